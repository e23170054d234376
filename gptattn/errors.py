"""The mistakes a user can make, each with its exit code; one line each, no traceback."""


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
