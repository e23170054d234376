"""Token ids in many files, read as one sequence: nanoGPT's files and modded-nanogpt's shards.

A shard is 256 int32 numbers, of which the first three are 20240520, 1 and the number of ids, and
then the ids in 16 bits each. What `scripts/prepare.py` writes has this form too.
Source: github.com/KellerJordan/modded-nanogpt, data/fineweb.py.
"""

import bisect
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptattn.data.token_files import PIECE_TOKENS, TOKEN_DTYPE, SharedFile, TokenFile
from gptattn.errors import DataError
from gptattn.machine.disk import write_atomically

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
IDS_IN_HEADER = HEADER_BYTES // TOKEN_DTYPE.itemsize
OPEN_FILES = 64  # at a time; a process may have 1,024


def header(count: int) -> bytes:
    """Return the first bytes of a shard of so many ids."""
    numbers = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    numbers[:3] = MAGIC, VERSION, count
    return numbers.tobytes()


@dataclass(frozen=True)
class Shard:
    """A file of ids: `count` of them, after `start` places of two bytes each."""

    path: Path
    start: int
    count: int


def shard_of(path: Path, field: str) -> Shard:
    """Return a file's ids, with or without a header.

    Raises DataError, naming `field`, for what cannot be a file of 16-bit ids.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            opening = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4")
    except OSError as error:
        raise DataError(field, f"{path} cannot be read ({error.strerror})") from None
    if opening[0] != MAGIC:
        if size == 0 or size % TOKEN_DTYPE.itemsize:
            raise DataError(field, f"{path} has {size:,} bytes, which are no 16-bit ids")
        return Shard(path, 0, size // TOKEN_DTYPE.itemsize)
    version, count = map(int, opening[1:])
    if version != VERSION:
        raise DataError(field, f"{path} is of version {version}; only {VERSION} is known")
    if count < 1 or size != HEADER_BYTES + TOKEN_DTYPE.itemsize * count:
        raise DataError(
            field, f"{path} has {size:,} bytes, which are not those of its {count:,} ids"
        )
    return Shard(path, IDS_IN_HEADER, count)


class ShardedTokens:
    """The ids of all shards, one after the other. Slices are read from the disk."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = list(shards)
        self._ends = list(accumulate(shard.count for shard in self.shards))
        self._opened = lru_cache(OPEN_FILES)(lambda number: _opened(self.shards[number]))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, part: slice, /) -> NDArray[np.uint16]:
        start, stop, step = part.indices(len(self))
        assert step == 1
        found = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[number] - self.shards[number].count
            end = min(stop, self._ends[number])
            found.append(self._opened(number)[start - first : end - first])
            start, number = end, number + 1
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint16), *found])

    def part(self, start: int, stop: int) -> "TokenRange":
        """Return the ids `start` .. `stop` - 1."""
        return TokenRange(self, start, stop)

    def pieces(self) -> Iterator[NDArray[np.uint16]]:
        """Yield all ids, at most PIECE_TOKENS of them at a time."""
        yield from self.part(0, len(self)).pieces()


@dataclass(frozen=True)
class TokenRange:
    """The ids `start` .. `stop` - 1 of a sequence of shards."""

    tokens: ShardedTokens
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice, /) -> NDArray[np.uint16]:
        start, stop, step = part.indices(len(self))
        assert step == 1
        return self.tokens[self.start + start : self.start + max(start, stop)]

    def part(self, start: int, stop: int) -> "TokenRange":
        """Return the ids `start` .. `stop` - 1 of this range."""
        return TokenRange(self.tokens, self.start + start, self.start + stop)

    def pieces(self) -> Iterator[NDArray[np.uint16]]:
        """Yield all ids, at most PIECE_TOKENS of them at a time."""
        for start in range(0, len(self), PIECE_TOKENS):
            yield self[start : start + PIECE_TOKENS]


def _opened(shard: Shard) -> TokenFile:
    return TokenFile(SharedFile(shard.path), shard.start, shard.start + shard.count)


@dataclass(frozen=True)
class Content:
    """What is in a file of ids: their SHA-256, without the header, and the highest of them."""

    sha256: str
    highest: int


def content_of(shard: Shard, cache: Path) -> Content:
    """Read a file of ids through, or return what was found the last time.

    The cache keeps it by the file's place, size and time of change.
    """
    status = shard.path.stat()
    made_of = f"{shard.path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{shard.start}"
    record = cache / f"{hashlib.sha256(made_of.encode()).hexdigest()}.ids.json"
    try:
        found = json.loads(record.read_bytes())
        return Content(str(found["sha256"]), int(found["highest"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or damaged: read anew
    digest, highest = hashlib.sha256(), 0
    for ids in ShardedTokens([shard]).pieces():
        digest.update(ids.data)
        highest = max(highest, int(ids.max()))
    found = {"sha256": digest.hexdigest(), "highest": highest}
    write_atomically(record, lambda file: file.write(json.dumps(found).encode()))
    return Content(digest.hexdigest(), highest)
