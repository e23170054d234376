"""A library's long call, which a signal ends and whose time is shown on stderr."""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

from gptattn.machine.read_progress import show_seconds

T = TypeVar("T")
U = TypeVar("U")
GRACE_SECONDS = 1.0  # for a call that is about to end


def call_aside(what: str, call: Callable[[Iterator[T]], U], given: Iterable[T]) -> U:
    """Return `call(given)`, made in another thread: Python handles signals in the main one only.

    What a signal raises ends `given`, and leaves the call behind if that takes too long.
    `call` must let other threads run.
    """
    result, interrupted = Future[U](), False

    def feed() -> Iterator[T]:
        for one in given:
            if interrupted:
                raise InterruptedError
            yield one

    def work() -> None:
        try:
            result.set_result(call(feed()))
        except BaseException as error:
            result.set_exception(error)

    Thread(target=work, daemon=True).start()  # the process does not wait for it
    try:
        with show_seconds(what) as advance:
            while not wait([result], timeout=1).done:
                advance(0)
    except BaseException as error:
        interrupted = True
        wait([result], timeout=GRACE_SECONDS)
        code = int(error.code or 0) if isinstance(error, SystemExit) else 130
        # Python aborts if the call comes back while the interpreter is taken down.
        atexit.register(lambda: result.done() or os._exit(code))
        raise
    return result.result()
