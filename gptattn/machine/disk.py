"""Writes files atomically: whole or not at all.

A full or read-only disk, or a missing permission, becomes one line with the path and the bytes
needed.
"""

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gptattn.errors import DiskError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSALS = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
LEFT_OVER = 86_400  # seconds after which nobody is writing an unfinished file any more


class Part:
    """A file being written, which gets the name `path` once all of it is on the disk.

    A caller whose file name depends on the content sets another `path`, in the same folder, while
    writing.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file, self.needed = path, file, 0  # bytes that were asked for

    def write(self, data: Any) -> int:
        self.needed += memoryview(data).nbytes
        return self.file.write(data)

    def writelines(self, lines: Iterable[bytes]) -> None:
        self.write(b"".join(lines))

    def flush(self) -> None:
        self.file.flush()


@contextlib.contextmanager
def writing(path: Path, size: Callable[[], int]) -> Iterator[None]:
    """Raise DiskError, naming the path, if the disk refuses; `size()` returns the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise DiskError(str(path.parent), "was removed or moved; start again") from error
        if error.errno not in REFUSALS:
            raise
        least = f"at least {size():,} bytes are needed"
        if error.errno == errno.EFBIG:
            way = f"{least}, raise the limit (ulimit -f)"
        elif error.errno in FULL:
            way = f"{least} and {free_bytes(path):,} are free, make room"
        else:
            way = "give another folder"
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


def write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Call `write(binary file)`; `path` appears, or is replaced, once all of it is on the disk.

    Raises DiskError, with the bytes needed, if the disk refuses.
    """
    with replacing(path) as part:
        write(part)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Part]:
    """Open a file for writing that takes the place of `path` once all of it is on the disk."""
    made: list[Part] = []
    with writing(path, lambda: made[0].needed if made else 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        try:
            with partial.open("xb") as file:
                made.append(Part(path, file))
                yield made[0]
                file.flush()
                os.fsync(file.fileno())
                partial.replace(made[0].path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            partial.unlink(missing_ok=True)


def remove_leftovers(folder: Path, names: str) -> None:
    """Remove old unfinished files of killed processes whose final names match this pattern."""
    for part in folder.glob("*.part"):
        if re.fullmatch(rf"({names})\.[0-9a-f]{{16}}\.part", part.name):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > LEFT_OVER:
                    part.unlink()
