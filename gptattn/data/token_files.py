"""Token ids in cache files; a file's name has a hash of how it was made and one of its content."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gptattn.data.document_starts import numbers_between, read_starts, write_starts
from gptattn.errors import DiskError
from gptattn.machine.disk import replacing

TOKEN_DTYPE = np.dtype("<u2")
PIECE_TOKENS = 2**20  # held at a time


class Tokens(Protocol):
    """A sequence of ids: an array, or a file from which slices are read."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[np.uint16]: ...


class SharedFile:
    """An open file, closed when the last object that reads from it is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The ids `start` .. `stop` - 1 of a file; a slice reads them from the disk.

    The file is not memory-mapped: if a mapped file is cut short, SIGBUS ends the process. A slice
    raises DiskError if the file no longer holds the ids. `starts`: where in the file documents
    begin, if that is known.
    """

    file: SharedFile
    start: int
    stop: int
    starts: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice, /) -> NDArray[np.uint16]:
        start, stop, step = part.indices(len(self))
        assert step == 1
        size = TOKEN_DTYPE.itemsize * max(0, stop - start)
        raw = os.pread(self.file.descriptor, size, TOKEN_DTYPE.itemsize * (self.start + start))
        if len(raw) < size:
            raise DiskError(
                str(self.file.path),
                "was cut short while it was being read; resume the run or start it again",
            )
        return np.frombuffer(raw, dtype=TOKEN_DTYPE)

    def part(self, start: int, stop: int) -> "TokenFile":
        """Return the ids `start` .. `stop` - 1 of this part of the file."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def documents(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the number of the document of each id `start` .. `stop` - 1; the first has 0."""
        assert self.starts is not None
        return numbers_between(self.starts, self.start + start, self.start + stop)

    def pieces(self) -> Iterator[NDArray[np.uint16]]:
        """Yield all ids, PIECE_TOKENS of them at a time."""
        for start in range(0, len(self), PIECE_TOKENS):
            yield self[start : start + PIECE_TOKENS]


def opened(path: Path) -> TokenFile:
    """Return all ids of a file."""
    file = SharedFile(path)
    return TokenFile(file, 0, os.fstat(file.descriptor).st_size // TOKEN_DTYPE.itemsize)


def cached_tokens(
    folder: Path,
    key: str,
    encode: Callable[[], Iterator[NDArray[np.uint16]]],
    check: Callable[[int], object],
    vocab_size: int,
) -> TokenFile:
    """Return the ids in `<key>-<sha256>.tokens`; without an intact file, encode and write it first.

    Before a new file appears, `check` is called with its number of tokens. Raises DiskError if the
    folder cannot be used.
    """
    with cache_errors(folder):
        for file in folder.glob(f"{key}-*.tokens"):
            tokens = _intact(file, vocab_size)
            if tokens is not None:
                return tokens
        return _written(folder, key, encode, check)


def with_starts(
    tokens: TokenFile, folder: Path, key: str, find: Callable[[], NDArray[np.int64]]
) -> TokenFile:
    """Return these tokens with where their documents begin, from `<key>-<sha256>.starts`.

    Without an intact file, `find` them and write it first. They are held: 8 bytes per document.
    Raises DiskError if the folder cannot be used.
    """
    with cache_errors(folder):
        starts = read_starts(folder, key, len(tokens))
        if starts is None:
            starts = find()
            write_starts(folder, key, starts)
    return replace(tokens, starts=starts)


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError or DiskError into a DiskError that names `cache_dir`."""
    try:
        yield
    except (OSError, DiskError) as error:
        reason = error.message if isinstance(error, DiskError) else error.strerror
        raise DiskError(
            "cache_dir", f"{folder} cannot be used ({reason}); give another cache_dir"
        ) from None


def _intact(file: Path, vocab_size: int) -> TokenFile | None:
    """Return the file's tokens, or None if it is damaged or has ids beyond the vocabulary."""
    size = file.stat().st_size if file.is_file() else 0
    if size == 0 or size % TOKEN_DTYPE.itemsize:
        return None
    tokens, digest, highest = opened(file), hashlib.sha256(), 0
    for ids in tokens.pieces():
        digest.update(ids.data)
        highest = max(highest, int(ids.max()))
    same = digest.hexdigest() == file.stem.rpartition("-")[2]
    return tokens if same and highest < vocab_size else None


def _written(
    folder: Path,
    key: str,
    encode: Callable[[], Iterator[NDArray[np.uint16]]],
    check: Callable[[int], object],
) -> TokenFile:
    pieces = encode()
    opening = list(islice(pieces, 2))
    if len(opening) < 2:
        check(sum(map(len, opening)))  # before the folder is made, for a text that is too short
    digest, count = hashlib.sha256(), 0

    def name() -> str:
        return f"{key}-{digest.hexdigest()}.tokens"

    with replacing(folder / key, name) as file:
        for ids in chain(opening, pieces):
            raw = ids.astype(TOKEN_DTYPE).data
            file.write(raw)
            digest.update(raw)
            count += len(ids)
        check(count)
    return opened(folder / name())
