"""Errors that print as one line without a traceback, each with its exit code."""

import errno
import re

# Texts of torch's out-of-memory errors; most have no exception class.
NO_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|(CUDA|HIP) out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
# What reading a half-written or hand-edited JSON file can raise.
DAMAGE = (
    *(OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    RecursionError,  # from deeply nested brackets
)


class UserError(Exception):
    """An error that prints as `error: <field>: <what is wrong>; <what would be right>`."""

    exit_code = 1

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        # Unpickled from a worker process, it is the error that the worker raised.
        return type(self), (self.field, self.message)


class ConfigError(UserError):
    """A setting that does not exist, has the wrong type, or cannot work."""

    exit_code = 2


class DataError(UserError):
    """A text, token file or tokenizer that cannot be used."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or from another model."""

    exit_code = 4


class NumericError(UserError):
    """A NaN or an infinity where a number should be."""

    exit_code = 5


class RunFolderError(UserError):
    """A run folder that cannot be used, for example because another process is writing to it."""

    exit_code = 6


class SweepError(UserError):
    """Runs of a sweep that failed; the exit code comes from the first one."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__("sweep", message)
        self.exit_code = exit_code


class DiskError(UserError):
    """A disk that is full or read-only, or a folder without permission."""

    exit_code = 7


class OutOfMemory(UserError):
    """Not enough free memory on the machine or on its GPU."""

    exit_code = 8


class ForeignError(UserError):
    """An error in the user's own code, such as a variant; its field is `file:line`."""


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out, judging by the type, the errno or the message."""
    lacking = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return lacking or NO_MEMORY.search(str(error)) is not None
