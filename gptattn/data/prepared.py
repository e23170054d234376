"""The index of a prepared text: which shards it consists of, and what made them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gptattn.data.document_starts import STARTS_DTYPE
from gptattn.data.shards import IDS_IN_HEADER, Shard, shard_of
from gptattn.data.tokenizer_files import IN_RUN
from gptattn.errors import DataError
from gptattn.machine.disk import write_atomically

INDEX = "index.json"
PLAN = "plan.json"  # of a preparation that has not ended
FORMAT = 1


@dataclass(frozen=True)
class ShardRecord:
    """What the index says of one shard. `bytes`: of the text, in UTF-8, without separators."""

    file: str
    side: str  # train or val
    tokens: int
    highest: int  # id
    sha256: str  # of the ids
    text_sha256: str
    bytes: int
    documents: int  # that begin in it; `documents_file` of it has where
    starts_sha256: str  # of that file


@dataclass(frozen=True)
class Index:
    """A prepared text. Its hash is that of the text, whatever the tokenizer."""

    text_sha256: str
    tokenizer: str  # fingerprint
    choice: str  # the tokenizer's name in conf/tokenizer
    characters: str  # of a char tokenizer, else ""
    plan: str  # hash of all that decides what is in the shards
    shards: Sequence[ShardRecord]
    format: int = FORMAT

    @property
    def highest(self) -> int:
        """The highest id."""
        return max(shard.highest for shard in self.shards)

    def paths(self, root: Path) -> list[Shard]:
        """Return the shards below `root`. Raises DataError for one that is missing or cut short."""
        return [self._shard(root, record) for record in self.shards]

    def shards_of(self, root: Path, side: str) -> list[Shard]:
        """Return the shards of one side, as `paths` does."""
        return [self._shard(root, record) for record in self.shards if record.side == side]

    def _shard(self, root: Path, record: ShardRecord) -> Shard:
        path = root / record.file
        if not path.is_file():
            raise damaged(root, path, "is missing")
        shard = shard_of(path, "data.path")
        if (shard.start, shard.count) != (IDS_IN_HEADER, record.tokens):
            raise damaged(root, path, f"is not the one in {INDEX}")
        return shard

    def starts(self, root: Path, side: str) -> NDArray[np.int64]:
        """Return where the documents of one side begin, in the sequence of its shards.

        Raises DataError if a file with them is missing or damaged.
        """
        found, before = [np.empty(0, np.int64)], 0
        for record in self.shards:
            if record.side == side:
                found.append(before + _starts(root, record))
                before += record.tokens
        return np.concatenate(found)

    def choice_for(self, root: Path) -> str:
        """Return the settings that choose the tokenizer which made the ids in this folder."""
        # gpt2 reads any byte-level BPE, also one that tokenizer=bpe has trained.
        own = (root / IN_RUN).is_dir()
        return f"tokenizer=gpt2 tokenizer.path={root}" if own else f"tokenizer={self.choice}"

    def facts(self) -> dict[str, Any]:
        """Return what a run's record says of the text."""
        documents = sum(shard.documents for shard in self.shards)
        return {"documents": documents, "held_out": "documents", "prepared": self.plan}


def _starts(root: Path, record: ShardRecord) -> NDArray[np.int64]:
    path = documents_file(root / record.file)
    try:
        raw = path.read_bytes()
    except (OSError, ValueError):
        raw = None
    if raw is None or hashlib.sha256(raw).hexdigest() != record.starts_sha256:
        raise damaged(root, path, "is missing or damaged")
    return np.frombuffer(raw, dtype=STARTS_DTYPE)


def damaged(root: Path, path: Path, how: str) -> DataError:
    """Return the error for a file of a prepared text."""
    return DataError("data.path", f"{path} {how}; remove {root} and prepare it again")


def documents_file(shard: Path) -> Path:
    """Return the file with the places in a shard at which documents begin, in ascending order."""
    return shard.with_suffix(".documents")


def read_index(root: Path) -> Index:
    """Return the index in a folder. Raises DataError if it is missing or damaged."""
    path = root / INDEX
    try:
        node = msgspec.json.decode(path.read_bytes())
        if isinstance(node, dict) and node.get("format") != FORMAT:
            raise ValueError("it is of another version")
        index = msgspec.convert(node, Index)
        if {record.side for record in index.shards} != {"train", "val"}:
            raise ValueError("it has no shards of both sides")
        if any(Path(record.file).name != record.file for record in index.shards):
            raise ValueError("a shard lies outside of the folder")
        return index
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "data.path", f"{path} cannot be used ({error}); run scripts/prepare.py again"
        ) from None


def write_index(root: Path, index: Index) -> None:
    """Write the index, which makes the folder a whole one."""
    text = json.dumps(asdict(index), indent=1, ensure_ascii=False)
    write_atomically(root / INDEX, lambda file: file.write(f"{text}\n".encode()))
