"""SIGTERM, Ctrl-C and a closed terminal (SIGHUP): while a run trains a wish, granted where the
state is whole; and output that nobody reads.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",
}


def heeded() -> list[signal.Signals]:
    """The signals that end a run: SIGHUP is none where it is ignored, as `nohup` has it.

    Ctrl-C always is one, though shells start what a script puts into the background without it.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in WORDS if number != signal.SIGHUP or not ignored]


def tell(line: str) -> None:
    """Say it on stderr, from a signal's handler: print() may be what was interrupted, and is not
    made to be entered twice. Output to a terminal that is gone goes nowhere from here on: a later
    print would raise, before the state is saved.
    """
    for descriptor, text in ((1, b""), (2, f"{line}\n".encode())):
        try:
            os.write(descriptor, text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class Stopped(BaseException):
    """A run that ended as asked, at the end of optimizer step `step`; `saved` if it can go on.

    No Exception: what catches those must let it through.
    """

    def __init__(self, signum: int, step: int, saved: bool) -> None:
        super().__init__(f"signal {signum} at step {step}")
        self.signum, self.step, self.saved = signum, step, saved


class StopRequest:
    """Notes the first of these signals. A second Ctrl-C is a KeyboardInterrupt, at once."""

    def __init__(self) -> None:
        self.signum: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals; those who handled them before get them back."""
        before = {number: signal.signal(number, self._note) for number in heeded()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, signum: int, frame: object) -> None:
        if self.signum is None:
            self.signum = signum
            again = "; Ctrl-C again ends it now" if signum == signal.SIGINT else ""
            tell(f"{WORDS[signal.Signals(signum)]}: ends after this step{again}")
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    def grant(self, step: int, saved: bool) -> NoReturn:
        assert self.signum is not None
        raise Stopped(self.signum, step, saved)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """The signals end the process here and now. For imports alone: there is nothing to lose yet,
    and what an exception leaves of half an import breaks whatever comes after it.
    """

    def end(signum: int, frame: object) -> NoReturn:
        tell(WORDS[signal.Signals(signum)])
        os._exit(128 + signum)

    before = {number: signal.signal(number, end) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_output() -> None:
    """Give a process that was started without stdout or stderr one that takes all: Python has None
    there, which not all can print to.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123


def reader_gone() -> int:
    """Whoever read the output has gone, `head` for one: say no more of it. Returns the exit code
    of a command that SIGPIPE ends.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
