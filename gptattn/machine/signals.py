"""SIGTERM, Ctrl-C and a closed terminal (SIGHUP), and output whose reader has gone.

While a run trains, a signal is a request, granted at the end of a step, where the state is whole.
"""

import os
import signal
import sys

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


def silence_stdout() -> int:
    """Silence stdout, whose reader (`head`, for example) has gone.

    Returns the exit code of a command that SIGPIPE ends.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
