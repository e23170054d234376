"""SIGTERM, Ctrl-C and a closed terminal (SIGHUP), and output whose reader has gone.

While a run trains, a signal is a request, granted at the end of a step, where the state is whole.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",
}


def handled_signals() -> list[signal.Signals]:
    """Return the signals that end a run: not SIGHUP if it is ignored, as under `nohup`.

    SIGINT (Ctrl-C) is always one of them, although shells start a script's background processes
    with SIGINT ignored.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in WORDS if number != signal.SIGHUP or not ignored]


def write_stderr(line: str) -> None:
    """Write a line to stderr from a signal handler.

    The signal may have interrupted print(), which cannot be entered twice. Output to a terminal
    that is gone is redirected to /dev/null, because a later print would raise before the state is
    saved.
    """
    for descriptor, text in ((1, b""), (2, f"{line}\n".encode())):
        try:
            os.write(descriptor, text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class Stopped(BaseException):
    """Raised when a run ends on request, after optimizer step `step`; `saved` if it can be resumed.

    It is not an Exception, so that code which catches those lets it through.
    """

    def __init__(self, signum: int, step: int, saved: bool) -> None:
        super().__init__(f"signal {signum} at step {step}")
        self.signum, self.step, self.saved = signum, step, saved


class StopRequest:
    """Remembers the first signal that asks for the end. A later Ctrl-C raises KeyboardInterrupt.

    Of several processes that train one run, all stop if one is asked to: `most` returns the largest
    of the numbers that they give. Only the one that `speaks` says so.
    """

    def __init__(
        self, most: Callable[[float], float] = lambda number: number, *, speaks: bool = True
    ) -> None:
        self.signum: int | None = None
        self._most, self._speaks = most, speaks

    def asked(self) -> bool:
        """Whether the run is to end. All of its processes ask at the same places."""
        asked = int(self._most(self.signum or 0))
        if asked and self.signum is None:
            self._note(asked, None)
        return asked != 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals in this block; the earlier handlers come back at its end."""
        before = {number: signal.signal(number, self._note) for number in handled_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, signum: int, frame: object) -> None:
        if self.signum is None:
            self.signum = signum
            again = "; Ctrl-C again stops it now" if signum == signal.SIGINT else ""
            if self._speaks:
                write_stderr(f"{WORDS[signal.Signals(signum)]}: stopping after this step{again}")
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    def raise_stopped(self, step: int, saved: bool) -> NoReturn:
        """Raise Stopped for the signal that was remembered."""
        assert self.signum is not None
        raise Stopped(self.signum, step, saved)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """In this block, a signal ends the process at once.

    Use it for imports only: there is nothing to lose yet, and an exception in the middle of an
    import leaves half of a module, which breaks the code that comes after it.
    """

    def end(signum: int, frame: object) -> NoReturn:
        write_stderr(WORDS[signal.Signals(signum)])
        os._exit(128 + signum)

    before = {number: signal.signal(number, end) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_output() -> None:
    """Open /dev/null as stdout or stderr if the process was started without it.

    Python sets a missing one to None, which not all code can print to.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123


def silence_stdout() -> int:
    """Silence stdout, whose reader (`head`, for example) has gone.

    Returns the exit code of a command that SIGPIPE ends.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def stop_with_parent() -> None:
    """Have SIGTERM come to this process when the one that has started it ends. On Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
