"""Token ids that lie in files already, as the data of a run: `data=bin`, and prepared texts."""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptattn.data.document_starts import DocumentNumbers, numbers_between
from gptattn.data.prepare import PartedText, discard, fit, prepare
from gptattn.data.prepared import INDEX, PLAN, Index, damaged, read_index
from gptattn.data.shards import Content, Shard, ShardedTokens, TokenRange, content_of, shard_of
from gptattn.data.text import cache_folder, expanded
from gptattn.data.tokenizer import CharTokenizer, TaskIds, Tokenizer
from gptattn.data.tokens import TokenData, held_out_bytes
from gptattn.errors import ConfigError, DataError, RunFolderError, UserError
from gptattn.machine.cpus import usable_cpus

WAIT_SECONDS = 1.0  # between looks at what another process prepares
QUIET_WAITS = 3
LARGE = 2**30  # bytes, which take a second or more to read


@dataclass(frozen=True)
class StoredTokens:
    """Ids for training and, unless the end of `train` is to be held out, for validation."""

    train: Sequence[Shard]
    val: Sequence[Shard]
    text_hash: str
    highest: int  # id
    index: Index | None = None  # of a text that scripts/prepare.py has prepared
    root: Path | None = None  # the folder of that
    reading: dict[str, Any] = field(default_factory=dict)  # facts for the run's record


def bin_files(
    path: str | None, val_path: str | None = None, cache_dir: str | None = None
) -> StoredTokens:
    """Return ids of 16 bits: what `scripts/prepare.py` wrote, or other projects' files as they are.

    `path` is a folder that was prepared; or one with `*train*.bin` and perhaps `*val*.bin`, as
    nanoGPT and modded-nanogpt write them; or one such file. Without a held-out file, and without
    `val_path`, the end of the ids is held out. Raises DataError, naming the file, for what is
    missing, damaged, or no file of ids.
    """
    if not path:
        raise DataError("data.path", "is not set; give a folder with .bin files, or a file")
    cache = cache_folder(cache_dir)
    root = expanded(path, "data.path")
    if (root / INDEX).is_file():
        if val_path:
            raise DataError("data.val_path", f"{root} has its own held-out part; leave it out")
        return _prepared(root, cache)
    if (root / PLAN).is_file():
        raise DataError(
            "data.path", f"{root} is not wholly prepared; run the command that prepares it again"
        )
    train = _shards(root, "*train*.bin", "data.path")
    if val_path:
        val = _shards(expanded(val_path, "data.val_path"), "*.bin", "data.val_path")
        train = _without(train, val, val_path)
    else:
        files = sorted(root.glob("*val*.bin")) if root.is_dir() else []
        val = [shard_of(file, "data.path") for file in files]
        train = _without(train, val, path) if val else train  # such as trainval.bin
    _say_if_large([*train, *val])
    contents = [[content_of(shard, cache) for shard in side] for side in (train, val)]
    lines = [json.dumps([content.sha256 for content in side]) for side in contents]
    highest = max(content.highest for side in contents for content in side)
    return StoredTokens(train, val, hashlib.sha256("\n".join(lines).encode()).hexdigest(), highest)


def _shards(root: Path, pattern: str, field: str) -> list[Shard]:
    if not root.exists():
        raise DataError(field, f"{root} does not exist; give a folder with .bin files, or a file")
    files = sorted(root.glob(pattern)) if root.is_dir() else [root]
    if not files:
        raise DataError(
            field, f"{root} has no {pattern}; give a folder with .bin files of ids, or a file"
        )
    return [shard_of(file, field) for file in files]


def _without(train: Sequence[Shard], val: Sequence[Shard], val_path: str) -> list[Shard]:
    """Return the shards of `train` that are not held out. Raises DataError if all are."""
    apart = {shard.path.resolve() for shard in val}
    rest = [shard for shard in train if shard.path.resolve() not in apart]
    if not rest:
        raise DataError(
            "data.val_path", f"{val_path} holds out all of data.path; give a part of it"
        )
    return rest


def _prepared(root: Path, cache: Path) -> StoredTokens:
    index = read_index(root)
    sides = {side: index.shards_of(root, side) for side in ("train", "val")}
    _say_if_large([shard for shards in sides.values() for shard in shards])
    for record, shard in zip(index.shards, index.paths(root), strict=True):
        if content_of(shard, cache) != Content(record.sha256, record.highest):
            raise damaged(root, shard.path, "is damaged")
    return StoredTokens(
        sides["train"], sides["val"], index.text_sha256, index.highest, index, root, index.facts()
    )


def _say_if_large(shards: Sequence[Shard]) -> None:
    size = sum(2 * shard.count for shard in shards)
    if size >= LARGE:
        print(f"data: checking {size / 1e9:.1f} GB of ids, once", file=sys.stderr, flush=True)


def stored_data(
    stored: StoredTokens,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    val_fraction: float,
    mask_documents: bool = False,
) -> TokenData:
    """Return the ids as a run's data; the other arguments are as in `load_tokens`.

    Raises ConfigError for a tokenizer that cannot be theirs, for too few ids, and for documents
    whose beginnings cannot be told.
    """
    _check_tokenizer(stored, tokenizer)
    train = ShardedTokens(stored.train)
    if stored.val:
        tokens, val = train.part(0, len(train)), ShardedTokens(stored.val)
        # Of what we prepared, the context is the last token of the separator at the beginning.
        context = 0 if stored.index is None else len(tokenizer.separator()[1]) - 1
        held_out = val.part(context, len(val))
    else:
        cut = len(train) - max(1, round(len(train) * val_fraction))
        tokens, held_out = train.part(0, cut), train.part(max(cut - 1, 0), len(train))
    for part, what in ((tokens, "training"), (held_out, "validation")):
        least = context_length + 1 if what == "training" else 2
        if len(part) < least:
            raise ConfigError(
                "model.context_length" if what == "training" else "data.val_path",
                f"the files have {len(part):,} ids for {what}, and {least:,} are needed; "
                "give larger files" + (", or a shorter context" if what == "training" else ""),
            )
    known = not isinstance(tokenizer, TaskIds)
    val_bytes = held_out_bytes(held_out, tokenizer, tokenizer.separator()[1]) if known else None
    documents = (None, None)
    if mask_documents:
        documents = (
            _documents(stored, tokenizer, "train", tokens),
            _documents(stored, tokenizer, "val" if stored.val else "train", held_out),
        )
    return TokenData(
        tokens, held_out, tokenizer, stored.text_hash, val_bytes, stored.reading, *documents
    )


def _documents(
    stored: StoredTokens, tokenizer: Tokenizer, side: str, ids: TokenRange
) -> DocumentNumbers:
    """Return what numbers the documents of these ids: by the index, or by the end of text."""
    if stored.index is not None and stored.root is not None:
        starts = stored.index.starts(stored.root, side)
        return lambda start, stop: numbers_between(starts, ids.start + start, ids.start + stop)
    end = np.empty(0) if isinstance(tokenizer, TaskIds) else tokenizer.separator()[1]
    if len(end) != 1:
        raise ConfigError(
            "data.mask_documents",
            "needs ids with an end of text, and its tokenizer, or a text that scripts/prepare.py "
            "has prepared; leave it out",
        )

    def numbers(start: int, stop: int) -> NDArray[np.int64]:
        begins = ids[start:stop] == end[0]
        begins[:1] = False  # the first document of a window has number 0
        return begins.cumsum()

    return numbers


def _check_tokenizer(stored: StoredTokens, tokenizer: Tokenizer) -> None:
    if stored.index is not None and stored.root is not None:
        tokenizer.fit([stored.index.characters])
        known = tokenizer.ready or isinstance(tokenizer, CharTokenizer)
        if not known or tokenizer.fingerprint() != stored.index.tokenizer:
            words = stored.index.choice_for(stored.root)
            raise ConfigError("tokenizer", f"is not that of the ids; give {words}")
    elif not tokenizer.ready:
        raise ConfigError(
            "tokenizer",
            "takes its vocabulary from a text, and the files have ids alone; give the one that "
            "made them, such as tokenizer=gpt2 tokenizer.path=FOLDER",
        )
    if isinstance(tokenizer, TaskIds) and not tokenizer.vocab_size:
        raise ConfigError(
            "tokenizer.vocab_size",
            f"is not set; the highest id is {stored.highest:,}, so give {stored.highest + 1} or "
            "more (GPT-2 has 50257)",
        )
    if stored.highest >= tokenizer.vocab_size:
        raise ConfigError(
            "tokenizer",
            f"has {tokenizer.vocab_size:,} ids, and the files have id {stored.highest:,}; for "
            "GPT-2's, give tokenizer=gpt2 tokenizer.path=FOLDER, or without its files "
            "tokenizer=none tokenizer.vocab_size=50257 sample.tokens=0",
        )


def in_cache(text: PartedText, tokenizer: Tokenizer, choice: str, cache: Path) -> StoredTokens:
    """Return the ids of a text, after preparing it in the cache unless that is done."""
    fit(tokenizer, text, cache)
    folder = cache / f"prepared-{text.plan(tokenizer)}"
    what = f"data: encoding {text.name}"
    waits = 0
    while True:
        try:
            if (folder / INDEX).is_file():
                try:
                    return _prepared(folder, cache)
                except DataError as error:
                    print(f"data: {_first(error)}; encoding again", file=sys.stderr, flush=True)
                    discard(folder, lambda: _is_damaged(folder, cache))
            prepare(text, tokenizer, folder, choice=choice, workers=usable_cpus(), what=what)
            return _prepared(folder, cache)
        except ConfigError as error:
            if error.field != "to":  # the folder has no index, and the plan of it is damaged
                raise
            discard(folder, lambda: not (folder / INDEX).is_file())
        except RunFolderError as error:  # another process of this run or sweep is at it
            if waits == QUIET_WAITS:
                print(f"data: {_first(error)}", file=sys.stderr, flush=True)
            time.sleep(WAIT_SECONDS)
            waits += 1


def _is_damaged(folder: Path, cache: Path) -> bool:
    try:
        _prepared(folder, cache)
    except DataError:
        return True
    return False


def _first(error: UserError) -> str:
    """Return what is wrong, without what to do."""
    return error.message.partition(";")[0]
