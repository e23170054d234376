"""A lock that lets one process at a time write to a folder; it ends with its process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from gptattn.errors import RunFolderError


@contextlib.contextmanager
def hold_lock(file: Path, field: str, busy: str) -> Iterator[None]:
    """Hold a lock on `file`. Raises RunFolderError, `field: busy`, if another process holds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file, timeout=0):
            yield
    except Timeout as error:
        raise RunFolderError(field, busy) from error
