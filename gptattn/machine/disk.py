"""Writes files atomically: whole or not at all, and never through a link.

A full or read-only disk, or a missing permission, becomes one line with the path and the bytes
needed.
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
# End of an unfinished file's name, after the final name; earlier versions put a process id there.
PART = r"\.(?:[0-9a-f]{16}|\d{1,10})\.part"


class Part:
    """A file being written, which gets the name `path` once all of it is on the disk.

    A caller whose file name depends on the content sets another `path`, in the same folder, while
    writing.
    """

    def __init__(self, path: Path, file: IO[bytes], needed: int) -> None:
        self.path, self.file = path, file
        self._asked, self._needed = 0, needed

    @property
    def needed(self) -> int:
        """The fewest bytes that the file will need, as known so far."""
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
    """Raise DiskError, naming the path, if the disk refuses; `size()` returns the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise DiskError(str(path.parent), "was removed or moved; start again") from error
        if error.errno not in REFUSALS:
            raise
        raise refused(path, error, size()) from error


def refused(path: Path, error: OSError, needed: int) -> DiskError:
    """Return the error for a refused write of at least `needed` bytes; 0: nothing to write yet."""
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
    """Return the error for a run folder that has disappeared."""
    return DiskError(
        str(folder),
        "the run's folder was removed or moved; start again, or if it was moved, use resume=FOLDER",
    )


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


def write_atomically(path: Path, write: Callable[[Any], object], root: Path | None = None) -> None:
    """Call `write(binary file)`; `path` appears, or is replaced, once all of it is on the disk.

    `root` is as in `make_folder`. Raises DiskError, with the bytes needed, if the disk refuses.
    """
    with replacing(path, root) as part:
        write(part)


@contextlib.contextmanager
def replacing(path: Path, root: Path | None = None, needed: int = 0) -> Iterator[Part]:
    """Open a file for writing that takes the place of `path` once all of it is on the disk.

    `needed` is the least size in bytes of a file that is written piece by piece, so that a
    DiskError can name it whichever piece the disk refuses. `root` is as in `make_folder`.
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

    `root` must exist, and may be reached through links. A link below it may have been planted to
    lead writes elsewhere. Raises DiskError for such a link, or if `root` is gone. Without `root`,
    `folder` and its parents are made.
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
    """Raise DiskError if the path is a link."""
    if path.is_symlink():
        raise DiskError(str(path), "is a link, which would lead writes elsewhere; remove it")


def _new_part(path: Path) -> tuple[Path, int]:
    """Create a new file next to `path`, locked and open for writing; it cannot be a link."""
    while True:
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.lexists(part):
            return part, descriptor
        os.close(descriptor)  # another process removed it as a leftover before it was locked


def remove_leftovers(folder: Path, names: str) -> list[Path]:
    """Remove unfinished files of killed processes whose final names match the pattern `names`.

    A file that a living process is writing stays, because that process holds a lock on it. Returns
    the final paths of the removed files.
    """
    found = []
    for part in folder.glob("*.part"):
        match = re.fullmatch(f"(?P<name>{names}){PART}", part.name)
        if match is not None and _removed(part):
            found.append(folder / match["name"])
    return found


def _removed(part: Path) -> bool:
    """Remove the file unless a process holds a lock on it; return whether it was removed."""
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
