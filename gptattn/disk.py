"""A disk that is full, read-only or closed to us: one line with the path and the bytes needed."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from gptattn.errors import DiskError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSALS = FULL | {errno.EROFS, errno.EACCES, errno.EPERM}


class ByteCounter:
    """A file that keeps nothing but the number of bytes written to it."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.count += size
        return size

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        pass


def size_of(write: Callable[[Any], object]) -> int:
    """How many bytes `write(file)` writes."""
    counter = ByteCounter()
    write(counter)
    return counter.count


@contextlib.contextmanager
def writing(path: Path, size: Callable[[], int]) -> Iterator[None]:
    """Raise DiskError, naming the path, where the disk refuses; `size()` tells the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        raise refused(path, error, size()) from error


def refused(path: Path, error: OSError, needed: int) -> DiskError:
    """What to tell of a write of `needed` bytes that the disk has refused."""
    reason = error.strerror or "refused"
    if error.errno == errno.EFBIG:
        return DiskError(
            str(path), f"{reason}; {needed:,} bytes are needed, raise the limit (ulimit -f)"
        )
    if error.errno not in FULL:
        return DiskError(
            str(path), f"{reason}; {needed:,} bytes are to be written, give another folder"
        )
    free = free_bytes(path)
    return DiskError(
        str(path), f"{reason}; {needed:,} bytes are needed and {free:,} are free, make room"
    )


def free_bytes(path: Path) -> int:
    """What may be written below the nearest folder that there is."""
    place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    there = os.statvfs(place)
    return there.f_bavail * there.f_frsize


def check_room(folder: Path, needed: int) -> None:
    """Raise DiskError where less than `needed` bytes are free for what will lie in the folder."""
    free = free_bytes(folder)
    if free < needed:
        raise DiskError(
            str(folder),
            f"{needed:,} bytes are needed and {free:,} are free; make room, or give another folder",
        )


def write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Call `write(binary file)`; `path` appears, or is replaced, when all of it is on the disk.

    Raises DiskError, with the bytes that `write` needs, where the disk will not take them.
    """
    with replacing(path, write) as file:
        write(file)


@contextlib.contextmanager
def replacing(path: Path, write: Callable[[Any], object]) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` once all of it is on the disk.

    `write` would write the same: asked for the bytes needed, where the disk will not take them.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    with writing(path, lambda: size_of(write)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            partial.unlink(missing_ok=True)
