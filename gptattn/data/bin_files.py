"""Token ids from existing files: prepared texts, nanoGPT's files, modded-nanogpt's shards.

A shard is 256 int32 numbers, of which the first three are 20240520, 1 and the number of ids, and
then the ids in 16 bits each. Source: github.com/KellerJordan/modded-nanogpt, data/fineweb.py.
"""

import bisect
import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gptattn.data.run_data import Request, Source
from gptattn.data.sampler import DocumentNumbers, Tokens
from gptattn.data.text import expand, find_files, leave_out
from gptattn.data.tokenizer import SEPARATOR, Ids, TaskIds, Tokenizer
from gptattn.data.tokenizer_files import IN_RUN
from gptattn.data.tokens import (
    INDEX,
    PIECE_TOKENS,
    TOKEN_DTYPE,
    TokenData,
    check_length,
    map_ids,
    read_index,
    read_tokens,
    stamp_file,
)
from gptattn.errors import ConfigError, DataError, DiskError
from gptattn.machine.disk import write_atomically
from gptattn.machine.read_progress import show_progress

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
        if size % TOKEN_DTYPE.itemsize:
            raise DataError(field, f"{path} has {size:,} bytes, so it holds no 16-bit ids")
        return Shard(path, 0, size // TOKEN_DTYPE.itemsize)
    version, count = map(int, opening[1:])
    if version != VERSION or size != HEADER_BYTES + TOKEN_DTYPE.itemsize * count:
        what = f"version {version} and {size:,} bytes for {count:,} ids"
        raise DataError(field, f"{path} is no whole shard of version {VERSION}: it has {what}")
    return Shard(path, HEADER_BYTES, count)


@lru_cache(OPEN_FILES)
def _map(shard: Shard) -> Ids:
    return map_ids(shard.path, shard.offset)


class ShardedIds:
    """The ids `start` .. `stop` - 1 of consecutive shards; by default all."""

    def __init__(self, shards: Sequence[Shard], start: int = 0, stop: int | None = None) -> None:
        self.shards, self.start = shards, start
        self.ends = list(accumulate(shard.count for shard in shards))
        self.stop = self.ends[-1] if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice, /) -> Ids:
        start, stop, step = part.indices(len(self))
        assert step == 1
        start, stop = self.start + start, self.start + stop
        found = [np.empty(0, np.uint16)]
        number = bisect.bisect_right(self.ends, start)
        while start < stop:
            first = self.ends[number] - self.shards[number].count
            end = min(stop, self.ends[number])
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

    def __init__(self, path: str, val_path: str | None = None) -> None:
        self.path, self.root, self.val_path = path, expand(path, "data.path"), val_path

    def load(self, request: Request) -> TokenData:
        if (self.root / INDEX).is_file():
            return self._load_prepared(request)
        tokenizer = request.tokenizer
        train, val = (
            [read_header(file, field) for file in files]
            for field, files in zip(("data.path", "data.val_path"), self._find_files(), strict=True)
        )
        contents = [[_measure_ids(shard, request.cache) for shard in side] for side in (train, val)]
        lines = [json.dumps([digest for _, digest in side]) for side in contents]
        text_hash = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        _check_tokenizer(tokenizer, max(highest for side in contents for highest, _ in side))
        ids = ShardedIds(train)
        if val:
            held_out = ShardedIds(val)
        else:  # the end, with one token of context
            cut = len(ids) - max(1, round(len(ids) * request.val_fraction))
            ids, held_out = ShardedIds(train, 0, cut), ShardedIds(train, max(cut - 1, 0))
        check_length(ids, request)
        val_bytes = None
        if not isinstance(tokenizer, TaskIds):
            val_bytes = _count_scored_bytes(held_out, tokenizer)
        documents = [None, None]
        if request.mask_documents:
            documents = [_number_documents(part, tokenizer) for part in (ids, held_out)]
        return TokenData(ids, held_out, tokenizer, text_hash, val_bytes, None, *documents)

    def _load_prepared(self, request: Request) -> TokenData:
        if self.val_path:
            raise DataError("data.val_path", f"{self.root} has its own held-out part; leave it out")
        index, tokenizer = read_index(self.root), request.tokenizer
        tokenizer.restore(index.settings, self.root)
        if not tokenizer.ready or tokenizer.fingerprint() != index.tokenizer:
            words = choose_tokenizer(index.choice, self.root)
            raise ConfigError("tokenizer", f"is not that of the ids; give {words}")
        return read_tokens(self.root, index, request)

    def _find_files(self) -> tuple[list[Path], list[Path]]:
        """Return the files to train on, and those to hold out, perhaps none."""
        if self.val_path:
            val = find_files(self.val_path, "*.bin", "data.val_path")
        else:
            val = sorted(self.root.glob("*val*.bin"))  # trainval.bin is one
        return leave_out(find_files(self.path, "*train*.bin", "data.path"), val), val


def _measure_ids(shard: Shard, cache: Path) -> tuple[int, str]:
    """Return the highest of a file's ids, and the SHA-256 of all.

    The file is read once: the cache keeps the answer by path, size and modification time.
    """
    record = cache / f"{hashlib.sha256(stamp_file(shard.path).encode()).hexdigest()}.ids.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or damaged: read anew
        return msgspec.json.decode(record.read_bytes(), type=tuple[int, str])
    ids, highest, digest = _map(shard), 0, hashlib.sha256()
    with show_progress(f"data: checking {shard.path}", ids.nbytes) as advance:
        for start in range(0, len(ids), PIECE_TOKENS):
            piece = ids[start : start + PIECE_TOKENS]
            digest.update(piece.data)
            highest = max(highest, int(piece.max()))
            advance(piece.nbytes)
    found = highest, digest.hexdigest()
    with contextlib.suppress(DiskError):  # read it again next time
        write_atomically(record, lambda file: file.write(json.dumps(found).encode()))
    return found


def choose_tokenizer(choice: str, root: Path) -> str:
    """Return the settings that choose the tokenizer which made the ids in a folder."""
    # gpt2 reads any byte-level BPE, also one that tokenizer=bpe has trained.
    own = (root / IN_RUN).is_dir()
    return f"tokenizer=gpt2 tokenizer.path={root}" if own else f"tokenizer={choice}"


def _check_tokenizer(tokenizer: Tokenizer, highest: int) -> None:
    """Raise ConfigError unless ids up to `highest` may be this tokenizer's."""
    if not tokenizer.ready or highest >= tokenizer.vocab_size:
        raise ConfigError(
            "tokenizer",
            f"did not make the ids up to {highest:,}; give the one that did, such as "
            "tokenizer=gpt2 tokenizer.path=FOLDER, or without its files tokenizer=none "
            f"tokenizer.vocab_size={highest + 1} (GPT-2 has 50257) sample.tokens=0",
        )


def _count_scored_bytes(ids: Tokens, tokenizer: Tokenizer) -> int:
    """Return the UTF-8 bytes of all ids but the first, which is only context."""
    lengths, separator = tokenizer.byte_lengths(), tokenizer.separator()
    if len(separator) == 1:  # an end of text counts as much as the SEPARATOR of other tokenizers
        lengths[separator] = len(SEPARATOR)
    places = range(1, len(ids), PIECE_TOKENS)
    return sum(int(lengths[ids[place : place + PIECE_TOKENS]].sum()) for place in places)


def _number_documents(ids: ShardedIds, tokenizer: Tokenizer) -> DocumentNumbers:
    """Return the numbering of these ids' documents, by the end of text before each."""
    end = [] if isinstance(tokenizer, TaskIds) else tokenizer.separator()
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
