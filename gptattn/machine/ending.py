"""How a command ends: signals, exit codes, and one line for a mistake; see docs/reliability.md."""

import contextlib
import errno
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import current_thread, main_thread

import gptattn
from gptattn.errors import (
    ConfigError,
    DiskError,
    ForeignError,
    OutOfMemory,
    UserError,
    lacks_memory,
)
from gptattn.machine.disk import REFUSALS

PACKAGE = Path(gptattn.__file__).parent
# Errors about a path that the system's own words explain to a user.
PATHS = {errno.ENOENT, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
ENDINGS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}
# Windows has no SIGHUP.
WORDS = {signal.Signals[name]: word for name, word in ENDINGS.items() if hasattr(signal, name)}


def handled_signals() -> list[signal.Signals]:
    """Return the signals that end a run: not SIGHUP if it is ignored, as under `nohup`.

    SIGINT (Ctrl-C) is always one of them, although shells start a script's background processes
    with SIGINT ignored.
    """
    return [n for n in WORDS if n.name != "SIGHUP" or signal.getsignal(n) is not signal.SIG_IGN]


@contextlib.contextmanager
def handle_signals(handler: signal.Handlers) -> Iterator[None]:
    """In this block, let signals end the process at once (SIG_DFL) or do nothing (SIG_IGN)."""
    ours = handled_signals() if current_thread() is main_thread() else []
    handlers = {number: signal.signal(number, handler) for number in ours}
    try:
        yield
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)


def write_stderr(line: str) -> None:
    """Write a line to stderr from a signal handler.

    The signal may have interrupted print(), which cannot be entered twice. If the terminal is gone,
    output goes to /dev/null, because a later print would raise before the state is saved.
    """
    for descriptor, text in ((1, b""), (2, f"{line}\n".encode())):
        try:
            os.write(descriptor, text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class Stopped(BaseException):
    """Raised when a signal ends a run after optimizer step `step`; `saved` if it can be resumed.

    It is not an Exception, so code that catches Exceptions lets it through.
    """

    def __init__(self, signum: int, step: int, saved: bool) -> None:
        super().__init__(f"signal {signum} at step {step}")
        self.signum, self.step, self.saved = signum, step, saved


def silence_stdout() -> int:
    """Silence stdout after its reader (`head`, for example) has gone.

    Returns the exit code of a command that SIGPIPE ends.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + 13  # SIGPIPE, which Windows lacks


def run_command(
    run: Callable[[], object],
    debug: bool = False,
    explain: Callable[[Exception], Exception] = lambda error: error,
) -> int:
    """Run a command; return its exit code, or that of the error that it raises.

    `explain` turns a library's error into a UserError.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`): the next open file would get its number
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "r+", encoding="utf-8"))
    code = 0
    try:
        try:
            run()
        except SystemExit as end:
            if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's, with exit code 1
                raise end.__context__ from None
            code = int(end.code or 0)
        sys.stdout.flush()
    except BrokenPipeError:
        return silence_stdout()
    except Exception as error:
        explained = explain(error)
        if explained is not error:
            explained.__cause__ = error
        return report(explained, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code


def report(error: Exception, debug: bool = False) -> int:
    """Print one line for a user's mistake, and a traceback for a bug; return the exit code."""
    mistake = as_user_error(error)
    if debug or mistake is None:
        traceback.print_exception(error)
    message = str(mistake)
    if mistake is None:
        what = str(error).strip().partition("\n")[0][:200]
        message = f"internal: {type(error).__name__}{': ' * bool(what)}{what}; please report it, "
        message += "unless the traceback ends in your own code"
    if isinstance(mistake, ForeignError) and not debug:
        message += "; HYDRA_FULL_ERROR=1 shows the traceback"
    line = re.sub(r"\s*[\r\n]\s*", " ", message).strip()
    print(f"error: {line}", file=sys.stderr)
    return 1 if mistake is None else mistake.exit_code


def as_user_error(error: BaseException) -> UserError | None:
    """Return the UserError for an error of the machine, the disk or the user's own code.

    Return None for any other error: a bug of ours.
    """
    if isinstance(error, UserError):
        return error
    repeats = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    if repeats is not None and isinstance(error, RuntimeError):  # torch's, on a GPU
        return ConfigError(
            "trainer.deterministic",
            f"torch's {repeats[1]} has no deterministic algorithm on this device; "
            "use trainer.deterministic=false",
        )
    if lacks_memory(error):
        return OutOfMemory(
            "memory", "too little for this run; raise accumulate, or use a smaller model"
        )
    if (place := find_own_code(error)) is not None:
        return ForeignError(place, f"{type(error).__name__}: {error}")
    if isinstance(error, OSError) and error.errno in REFUSALS | PATHS:
        return DiskError(
            str(error.filename or "disk"), f"{error.strerror}; give another path, or make room"
        )
    return None


def find_own_code(error: BaseException) -> str | None:
    """Return the `file:line` of the user's own code that raised the error or let it pass."""
    main = getattr(sys.modules["__main__"], "__file__", None) or PACKAGE  # train.py or a script
    libraries = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    others = [PACKAGE, PACKAGE.parent / "hydra_plugins", main, *libraries]
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and error.filename:  # a file that cannot be parsed
        places.append((error.filename, error.lineno or 1))
    for name, line in reversed(places):
        file = Path(name)
        if file.is_file() and not any(file.is_relative_to(other) for other in others):
            near = file.is_relative_to(Path.cwd())
            return f"{file.relative_to(Path.cwd()) if near else file}:{line}"
    return None
