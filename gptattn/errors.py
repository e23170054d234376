"""The mistakes a user can make, each with its exit code; one line each, no traceback."""

import errno
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

# Of errors that torch has no class of their own for.
NO_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|(CUDA|HIP) out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)


class UserError(Exception):
    """`error: <field>: <what is wrong>; <what would be right>`."""

    exit_code = 1

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class ConfigError(UserError):
    """A setting that does not exist, has the wrong type, or cannot work."""

    exit_code = 2


class DataError(UserError):
    """A text, token file or tokenizer that cannot be used."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model."""

    exit_code = 4


class NumericError(UserError):
    """A NaN or an infinity where a number should be."""

    exit_code = 5


class RunFolderError(UserError):
    """A run folder that another run owns."""

    exit_code = 6


class SweepError(UserError):
    """Runs of a sweep that failed; exits with the code of the first of them."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__("sweep", message)
        self.exit_code = exit_code


class DiskError(UserError):
    """A disk that is full or read-only, or a folder without permission."""

    exit_code = 7


class OutOfMemory(UserError):
    """More memory than there is at the time, on the machine or on its GPU."""

    exit_code = 8


class ForeignError(UserError):
    """An error out of a package that `allow_targets` names; its field is a file and a line."""


def lacks_memory(error: BaseException) -> bool:
    """Whether it was raised for want of memory, in whatever words."""
    lacking = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return lacking or NO_MEMORY.search(str(error)) is not None


def foreign(error: BaseException, packages: Sequence[str]) -> ForeignError | None:
    """The error as one of these packages', where it came through their code or cannot be read."""
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _lies_in(str(frame.f_globals.get("__name__")), packages)
    ]
    if packages and isinstance(error, SyntaxError) and error.filename and error.lineno:
        places.append((error.filename, error.lineno))
    if not places:
        return None
    file, line = places[-1]
    path = Path(file)
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else file
    return ForeignError(f"{shown}:{line}", f"{type(error).__name__}: {error}")


def _lies_in(module: str, packages: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)
