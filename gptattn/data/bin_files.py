"""Token ids from existing files: prepared texts, nanoGPT's files, modded-nanogpt's shards.

A shard is 256 int32 numbers, of which the first three are 20240520, 1 and the number of ids, and
then the ids in 16 bits each. Source: github.com/KellerJordan/modded-nanogpt, data/fineweb.py.
"""

import bisect
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptattn.data.run_data import Request, Source
from gptattn.data.sampler import DocumentNumbers
from gptattn.data.text import expand
from gptattn.data.tokenizer import Ids, TaskIds, Tokenizer
from gptattn.data.tokenizer_files import IN_RUN
from gptattn.data.tokens import (
    INDEX,
    TOKEN_DTYPE,
    TokenData,
    check_lengths,
    content_of,
    count_bytes,
    map_ids,
    read_index,
    read_tokens,
)
from gptattn.errors import ConfigError, DataError

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
OPEN_FILES = 64  # open at a time; a process may have 1,024


@dataclass(frozen=True)
class Shard:
    """A file of `count` ids from byte `offset` on."""

    path: Path
    offset: int
    count: int


def read_header(path: Path, field: str) -> Shard:
    """Return where a file's ids are, with or without a header.

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
            raise DataError(field, f"{path} has {size:,} bytes, so it holds no 16-bit ids")
        return Shard(path, 0, size // TOKEN_DTYPE.itemsize)
    version, count = map(int, opening[1:])
    if version != VERSION:
        raise DataError(field, f"{path} has version {version}; only {VERSION} is supported")
    if count < 1 or size != HEADER_BYTES + TOKEN_DTYPE.itemsize * count:
        raise DataError(field, f"{path} has {size:,} bytes, which do not fit its {count:,} ids")
    return Shard(path, HEADER_BYTES, count)


@lru_cache(OPEN_FILES)
def _map(shard: Shard) -> Ids:
    return map_ids(shard.path, shard.offset)


@dataclass(frozen=True)
class ShardedIds:
    """The ids `start` .. `stop` - 1 of consecutive shards."""

    shards: Sequence[Shard]
    start: int
    stop: int

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> "ShardedIds":
        """Return all ids of the shards."""
        return cls(shards, 0, sum(shard.count for shard in shards))

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(shard.count for shard in self.shards))

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "ShardedIds":
        """Return the ids `start` .. `stop` - 1 of these."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def __getitem__(self, part: slice, /) -> Ids:
        start, stop, step = part.indices(len(self))
        assert step == 1
        start, stop = self.start + start, self.start + stop
        found = [np.empty(0, np.uint16)]
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[number] - self.shards[number].count
            end = min(stop, self._ends[number])
            found.append(_map(self.shards[number])[start - first : end - first])
            start, number = end, number + 1
        return found[-1] if len(found) <= 2 else np.concatenate(found)


class BinFiles(Source):
    """Ids of 16 bits: a prepared folder, or other projects' files as they are.

    `path` is a prepared folder; or one with `*train*.bin` and perhaps `*val*.bin`, as nanoGPT and
    modded-nanogpt write them; or one such file. Without a held-out file, and without `val_path`,
    the end of the ids is held out. Raises DataError, naming the file, for what is missing, damaged,
    or no file of ids.
    """

    def __init__(self, path: str | None, val_path: str | None = None) -> None:
        if not path:
            raise DataError("data.path", "is not set; give a folder with .bin files, or a file")
        self.path, self.root, self.val_path = path, expand(path, "data.path"), val_path

    def load(self, request: Request) -> TokenData:
        if not (self.root / INDEX).is_file():
            return self._load_foreign(request)
        if self.val_path:
            raise DataError("data.val_path", f"{self.root} has its own held-out part; leave it out")
        index, tokenizer = read_index(self.root, request.cache), request.tokenizer
        tokenizer.restore(index.settings, self.root)
        if not tokenizer.ready or tokenizer.fingerprint() != index.tokenizer:
            words = choose_tokenizer(index.choice, self.root)
            raise ConfigError("tokenizer", f"is not that of the ids; give {words}")
        return read_tokens(self.root, index, request)

    def _load_foreign(self, request: Request) -> TokenData:
        train = _find_shards(self.root, "*train*.bin", "data.path")
        if self.val_path:
            held_out = expand(self.val_path, "data.val_path")
            val = _find_shards(held_out, "*.bin", "data.val_path")
            train = _leave_out(train, val, self.val_path)
        else:
            files = sorted(self.root.glob("*val*.bin")) if self.root.is_dir() else []
            val = [read_header(file, "data.path") for file in files]
            train = _leave_out(train, val, self.path) if val else train  # such as trainval.bin
        contents = [
            [content_of(ShardedIds.of([shard]), shard.path, request.cache) for shard in side]
            for side in (train, val)
        ]
        lines = [json.dumps([digest for _, digest in side]) for side in contents]
        text_hash = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        tokenizer = request.tokenizer
        _check_tokenizer(tokenizer, max(highest for side in contents for highest, _ in side))
        ids = ShardedIds.of(train)
        if val:
            held_out = ShardedIds.of(val)
        else:
            cut = len(ids) - max(1, round(len(ids) * request.val_fraction))
            ids, held_out = ids.part(0, cut), ids.part(max(cut - 1, 0), len(ids))
        check_lengths(ids, held_out, request)
        val_bytes = None
        if not isinstance(tokenizer, TaskIds):
            scored = held_out.part(1, len(held_out))
            val_bytes = count_bytes(scored, tokenizer, tokenizer.separator()[1])
        documents = [None, None]
        if request.mask_documents:
            documents = [_number_documents(part, tokenizer) for part in (ids, held_out)]
        return TokenData(ids, held_out, tokenizer, text_hash, val_bytes, {}, *documents)


def choose_tokenizer(choice: str, root: Path) -> str:
    """Return the settings that choose the tokenizer which made the ids in a folder."""
    # gpt2 reads any byte-level BPE, also one that tokenizer=bpe has trained.
    own = (root / IN_RUN).is_dir()
    return f"tokenizer=gpt2 tokenizer.path={root}" if own else f"tokenizer={choice}"


def _find_shards(root: Path, pattern: str, field: str) -> list[Shard]:
    if not root.exists():
        raise DataError(field, f"{root} does not exist; give a folder with .bin files, or a file")
    files = sorted(root.glob(pattern)) if root.is_dir() else [root]
    if not files:
        raise DataError(
            field, f"{root} has no {pattern}; give a folder with .bin files of ids, or a file"
        )
    return [read_header(file, field) for file in files]


def _leave_out(train: Sequence[Shard], val: Sequence[Shard], val_path: str) -> list[Shard]:
    """Return the shards of `train` that are not held out. Raises DataError if all are."""
    apart = {shard.path.resolve() for shard in val}
    rest = [shard for shard in train if shard.path.resolve() not in apart]
    if not rest:
        raise DataError(
            "data.val_path", f"{val_path} holds out all of data.path; give a part of it"
        )
    return rest


def _check_tokenizer(tokenizer: Tokenizer, highest: int) -> None:
    """Raise ConfigError unless ids up to `highest` may be this tokenizer's."""
    if not tokenizer.ready:
        raise ConfigError(
            "tokenizer",
            "takes its vocabulary from a text, and the files have ids alone; give the one that "
            "made them, such as tokenizer=gpt2 tokenizer.path=FOLDER",
        )
    if isinstance(tokenizer, TaskIds) and not tokenizer.vocab_size:
        raise ConfigError(
            "tokenizer.vocab_size",
            f"is not set; the highest id is {highest:,}, so give {highest + 1} or more (GPT-2 has "
            "50257)",
        )
    if highest >= tokenizer.vocab_size:
        raise ConfigError(
            "tokenizer",
            f"has {tokenizer.vocab_size:,} ids, and the files have id {highest:,}; for GPT-2's, "
            "give tokenizer=gpt2 tokenizer.path=FOLDER, or without its files tokenizer=none "
            "tokenizer.vocab_size=50257 sample.tokens=0",
        )


def _number_documents(ids: ShardedIds, tokenizer: Tokenizer) -> DocumentNumbers:
    """Return the numbering of these ids' documents, by the end of text before each."""
    end = [] if isinstance(tokenizer, TaskIds) else tokenizer.separator()[1]
    if len(end) != 1:
        raise ConfigError(
            "data.mask_documents",
            "needs ids with an end of text, and its tokenizer, or a text that scripts/prepare.py "
            "has prepared; leave it out",
        )

    def number(start: int, stop: int) -> NDArray[np.int64]:
        begins = ids[start:stop] == end[0]
        begins[:1] = False  # the first document of a window has number 0
        return begins.cumsum()

    return number
