"""How a command ends: one line for a mistake, an exit code, and Ctrl-C. Knows no Hydra: what
calls Hydra makes UserErrors of its complaints there.
"""

import errno
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from gptattn.errors import (
    DiskError,
    ForeignError,
    OutOfMemory,
    UserError,
    foreign,
    lacks_memory,
)
from gptattn.machine.disk import REFUSALS
from gptattn.machine.signals import open_output, reader_gone

LONGEST_LINE = 900  # characters of an error; its end says what would be right
NO_PLACE = {errno.ENOENT, errno.ENAMETOOLONG}
IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


def ended(run: Callable[[], int | None], debug: bool = False) -> int:
    """Run a command; its exit code: what it returns, or that of the error that it raises."""
    open_output()
    try:
        try:
            code = run()
        except SystemExit as end:  # after Hydra's help, or a signal
            code = int(end.code or 0)
        sys.stdout.flush()
    except BrokenPipeError:
        return reader_gone()
    except Exception as error:
        return report(error, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code or 0


def report(error: Exception, debug: bool = False) -> int:
    """One line on stderr for a user's mistake, a traceback for ours; return the exit code."""
    packages = _packages(sys.argv)
    known = as_user_error(error, packages)
    if debug or known is None:
        traceback.print_exception(error)
    message = str(known)
    if known is None:
        what = str(error).strip().partition("\n")[0][:200]
        unless = f"if it is none of {', '.join(packages)}, " if packages else ""
        message = (
            f"internal: {type(error).__name__}{': ' * bool(what)}{what}; {unless}please report it"
        )
    if isinstance(known, ForeignError) and not debug:
        message += "; --debug shows the traceback"
    line = re.sub(r"\s*[\r\n]\s*", " ", message).strip()
    # What was given is told again; a terminal must not obey what is in it.
    line = "".join(c if c.isprintable() else "\ufffd" for c in line)
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE * 2 // 3]} … {line[-LONGEST_LINE // 3 :]}"
    print(f"error: {line}", file=sys.stderr)
    return 1 if known is None else known.exit_code


def _packages(arguments: Sequence[str]) -> list[str]:
    """What `allow_targets=` says, however it is written: of this an error must not come."""
    given = [a.partition("=")[2] for a in arguments if re.match(r"\+*allow_targets=", a)]
    return re.findall(r"[\w.]+", " ".join(given))


def as_user_error(error: BaseException, packages: Sequence[str] = ()) -> UserError | None:
    """What the machine, one of these `packages` or the disk complain of, in our form.

    None for a bug of ours.
    """
    if isinstance(error, UserError):
        return error
    if lacks_memory(error):
        return OutOfMemory(
            "memory", "too little for this run; raise accumulate, or take a smaller model"
        )
    if (theirs := foreign(error, packages)) is not None:
        return theirs
    if isinstance(error, OSError) and error.errno in IN_THE_WAY:
        return DiskError(
            str(error.filename or "disk"), f"{error.strerror}; remove it, or give another folder"
        )
    if isinstance(error, OSError) and error.errno in REFUSALS | NO_PLACE:
        return DiskError(
            str(error.filename or "disk"), f"{error.strerror}; give another folder, or make room"
        )
    return None
