"""Writes files atomically: whole or not at all.

If the disk is full or read-only, or permission is missing, DiskError names the path.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from gptattn.errors import DiskError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSALS = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Raise DiskError, naming the path, if the disk refuses."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise DiskError(str(path.parent), "was removed or moved; start again") from error
        if error.errno not in REFUSALS:
            raise
        way = "give another folder"
        if error.errno in FULL:
            way = f"{free_bytes(path):,} bytes are free, make room"
        raise DiskError(str(path), f"{error.strerror}; {way}") from error


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, or of its nearest folder that exists."""
    place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    there = os.statvfs(place)
    return there.f_bavail * there.f_frsize


def check_room(folder: Path, needed: int) -> None:
    """Raise DiskError if fewer than `needed` bytes are free for the contents of the folder."""
    free = free_bytes(folder)
    if free < needed:
        raise DiskError(
            str(folder),
            f"{needed:,} bytes are needed and {free:,} are free; make room, or give another folder",
        )


@contextlib.contextmanager
def disk_errors(folder: Path, option: str) -> Iterator[None]:
    """Turn an OSError into a DiskError that names the command's `option` and `folder`."""
    try:
        yield
    except OSError as error:
        raise DiskError(option, f"{folder}: {error.strerror}; give another folder") from error


def write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Call `write(binary file)`; `path` appears, or is replaced, once all of it is on the disk.

    Raises DiskError if the disk refuses.
    """
    with replacing(path) as file:
        write(file)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes the place of `path` once all of it is on the disk."""
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        try:
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
