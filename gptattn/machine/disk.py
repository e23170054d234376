"""Typed paths, files that are written whole or not at all, and which files may be replaced.

If the disk is full or read-only, or permission is missing, DiskError names the path.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from gptattn.errors import ConfigError, DiskError, RunFolderError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
T = TypeVar("T")
PART = ".gptattn-part"  # ends the name of a file that is being written
REFUSALS = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}


def expand_path(typed: str | Path, field: str) -> Path:
    """Return a typed path with `~` at its start expanded, and nothing else.

    Raises ConfigError, naming `field`, if the user does not exist.
    """
    try:
        return Path(typed).expanduser()
    except RuntimeError:
        what = f"{typed}: there is no such home folder; give the whole path"
        raise ConfigError(field, what) from None


def walk_once(
    root: Path, seen: set[str], onerror: Callable[[OSError], None] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder at or below the root, with the names of its folders and files.

    Follows links, but enters each folder once: `seen` has the real paths. Skips hidden folders.
    """
    for where, below, files in os.walk(root, onerror=onerror, followlinks=True):
        real = os.path.realpath(where)
        below[:] = sorted(name for name in below if name[0] != "." and real not in seen)
        if real not in seen:
            seen.add(real)
            yield Path(where), below, files


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Raise DiskError, naming the path, if the disk refuses."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        way = "give another folder"
        if error.errno in FULL:
            way = f"make room ({free_bytes(path):,} bytes are free)"
        raise DiskError(str(path), f"{error.strerror}; {way}") from error


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, or of its nearest folder that exists."""
    place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(place).free


def check_room(folder: Path, needed: int) -> None:
    """Raise DiskError if fewer than `needed` bytes are free for the contents of the folder."""
    free = free_bytes(folder)
    if free < needed:
        raise DiskError(
            str(folder),
            f"needs {needed:,} bytes but {free:,} are free; make room, or give another folder",
        )


def refuse_taken(folder: Path, field: str, *names: str) -> None:
    """Raise RunFolderError, naming `field`, for a file, or for a folder with one of these names.

    `names`: patterns of the files that a command is about to write and that it did not make.
    """
    taken = [folder] if folder.is_file() else (f for name in names for f in folder.glob(name))
    for file in taken:
        raise RunFolderError(field, f"{file} is in the way; move it, or give another folder")


def claim_folder(folder: Path, kind: str, field: str, *names: str) -> None:
    """Make the folder, or take it, so that files of these `names` are ours to replace and remove.

    A marker file records that. Raises RunFolderError as `refuse_taken` does, and DiskError if the
    folder cannot be written.
    """
    mark = folder / f".gptattn-{kind}"
    if not mark.exists():
        refuse_taken(folder, field, *names)
    write_atomically(mark, lambda _: None)


def remove_partials(*folders: Path) -> None:
    """Remove the partial files that killed processes left in the folders."""
    for part in (part for folder in folders for part in folder.glob(f"*{PART}")):
        part.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Call `write(binary file)`; `path` appears, or is replaced, once all of it is on the disk.

    Raises DiskError if the disk refuses.
    """
    with replacing(path) as file:
        write(file)


def write_json(path: Path, value: Any) -> None:
    """Write or replace a file of indented JSON, as `write_atomically` does."""
    data = msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
    write_atomically(path, lambda file: file.write(data))


def read_json(path: Path, kind: type[T]) -> T | None:
    """Return the content of a JSON file as this type; None if it is missing or does not fit."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError):
        return None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes the place of `path` once all of it is on the disk."""
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PART}")
        try:
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
