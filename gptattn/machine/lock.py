"""A lock that lets only one process write to a folder; it ends with that process."""

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
