"""Every file that is made or replaced: whole or not at all, and never through a link.

A disk that is full, read-only or closed to us is one line with the path and the bytes needed.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gptattn.errors import DiskError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSALS = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
# Behind the name that a file will get; earlier versions had the number of their process there.
PART = r"\.(?:[0-9a-f]{16}|\d{1,10})\.part"


class Part:
    """A file that is being written, and will have the name `path` once all of it is on the disk.

    Who learns the name from the content sets another `path`, in the same folder, meanwhile.
    """

    def __init__(self, path: Path, file: IO[bytes], needed: int) -> None:
        self.path, self.file = path, file
        self._asked, self._needed = 0, needed

    @property
    def needed(self) -> int:
        """The fewest bytes that the disk must have for it, as far as is known by now."""
        return max(self._asked, self._needed)

    def write(self, data: Any) -> int:
        self._asked += memoryview(data).nbytes
        return self.file.write(data)

    def writelines(self, lines: Iterable[bytes]) -> None:
        self.write(b"".join(lines))

    def flush(self) -> None:
        self.file.flush()


@contextlib.contextmanager
def writing(path: Path, size: Callable[[], int]) -> Iterator[None]:
    """Raise DiskError, naming the path, where the disk refuses; `size()` tells the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise DiskError(
                str(path.parent), "is gone, removed or moved meanwhile; start again"
            ) from error
        if error.errno not in REFUSALS:
            raise
        raise refused(path, error, size()) from error


def refused(path: Path, error: OSError, needed: int) -> DiskError:
    """What to tell of a write of `needed` bytes or more that the disk has refused.

    `needed` 0: nothing was to be written yet.
    """
    reason = error.strerror or "refused"
    least = f"at least {needed:,} bytes are needed"
    if error.errno == errno.EFBIG:
        way = f"{least}, raise the limit (ulimit -f)"
    elif error.errno not in FULL:
        way = "give another folder"
    elif needed:
        way = f"{least} and {free_bytes(path):,} are free, make room"
    else:
        way = "make room"
    return DiskError(str(path), f"{reason}; {way}")


def gone(folder: Path) -> DiskError:
    """What to tell of a run's folder that was there before."""
    return DiskError(
        str(folder),
        "the run's folder is gone, removed or moved meanwhile; start it anew, or, where it was "
        "moved, go on there with resume=FOLDER",
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


def write_atomically(path: Path, write: Callable[[Any], object], root: Path | None = None) -> None:
    """Call `write(binary file)`; `path` appears, or is replaced, when all of it is on the disk.

    `root` as in `make_folder`. Raises DiskError, with the bytes that are needed, where the disk
    will not take them.
    """
    with replacing(path, root) as part:
        write(part)


@contextlib.contextmanager
def replacing(path: Path, root: Path | None = None, needed: int = 0) -> Iterator[Part]:
    """A file to write to, which takes the place of `path` once all of it is on the disk.

    `needed`: the bytes that it will have at least, where it is written piece by piece: what a
    disk that refuses a piece is said to lack.
    """
    made: list[Part] = []
    with writing(path, lambda: made[0].needed if made else needed):
        make_folder(path.parent, root)
        remove_leftovers(path.parent, re.escape(path.name))
        partial, descriptor = _new_part(path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                made.append(Part(path, file, needed))
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


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Make `folder`, and what is missing between it and `root`, the folder that the user named.

    `root` is there, and may be reached by links; below it somebody else may have put one, which
    would lead what is written elsewhere. Raises DiskError for such a link, and where `root` has
    gone. `root` None: it is `folder`, and is made.
    """
    if root is None:
        folder.mkdir(parents=True, exist_ok=True)
        return
    if not root.is_dir():
        raise gone(root)
    place = root
    for name in folder.relative_to(root).parts:
        place /= name
        refuse_link(place)
        place.mkdir(exist_ok=True)


def refuse_link(path: Path) -> None:
    """Raise DiskError where the path is a link."""
    if path.is_symlink():
        raise DiskError(
            str(path), "is a link, and what is written to it would land elsewhere; remove it"
        )


def _new_part(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, locked, and open to be written. It can be no link of others."""
    while True:
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o666)
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.lexists(part):
            return part, descriptor
        os.close(descriptor)  # taken for a leftover before it was locked


def remove_leftovers(folder: Path, names: str) -> list[Path]:
    """Remove what killed processes have left of files whose names match the pattern `names`.

    What a living one is writing stays: it holds a lock on it. Returns what they would have become.
    """
    found = []
    for part in folder.glob("*.part"):
        match = re.fullmatch(f"(?P<name>{names}){PART}", part.name)
        if match is not None and _removed(part):
            found.append(folder / match["name"])
    return found


def _removed(part: Path) -> bool:
    """Whether it was a file that nobody holds, which is gone now."""
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
