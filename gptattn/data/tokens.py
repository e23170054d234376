"""Turns a text into tokens, split into training tokens and held-out tokens."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptattn.data.corpus import (
    Corpus,
    Document,
    Part,
    corpus_of,
    heads_and_tails,
    read_through,
    size_of,
    text_hash,
    whole,
)
from gptattn.data.document_starts import DocumentNumbers
from gptattn.data.run_data import RunData
from gptattn.data.sampler import Batch, Rows, ValidationSet, opening_rows, training_batch
from gptattn.data.shards import TokenRange
from gptattn.data.token_files import TokenFile, Tokens, cached_tokens, with_starts
from gptattn.data.tokenizer import SEPARATOR, Tokenizer
from gptattn.errors import ConfigError
from gptattn.machine.read_progress import show_progress, with_progress
from gptattn.machine.source_code import class_code

Ids = NDArray[np.uint16]


@dataclass(frozen=True)
class TokenData(RunData):
    """Training tokens and held-out tokens of one text under one tokenizer."""

    train: Tokens
    val: Tokens  # the first token is only context, the others are scored
    tokenizer: Tokenizer
    text_hash: str
    val_bytes: int | None  # UTF-8 bytes that the scored tokens stand for
    reading: Mapping[str, Any] = field(default_factory=dict)  # facts for the run's record
    train_documents: DocumentNumbers | None = None  # of `train`; given if they are kept apart
    val_documents: DocumentNumbers | None = None  # of `val`

    def training_batch(
        self,
        seed: int,
        step: int,
        batch_size: int,
        context_length: int,
        rows: Rows | None = None,
    ) -> Batch:
        sizes = batch_size, context_length
        return training_batch(self.train, seed, step, *sizes, self.train_documents, rows)

    def validation(self, batch_size: int, context_length: int) -> ValidationSet:
        return ValidationSet(self.val, batch_size, context_length, self.val_documents)

    def opening_rows(self, context_length: int, tokens: int) -> Tensor:
        return opening_rows(self.val, context_length, tokens)

    def opening_documents(self, rows: Tensor) -> Tensor | None:
        if self.val_documents is None:
            return None
        return torch.from_numpy(self.val_documents(0, rows.numel())).view_as(rows)

    @property
    def val_tokens(self) -> int:
        return len(self.val)

    @property
    def scored(self) -> float:
        return 1.0

    def facts(self) -> dict[str, Any]:
        counts = {"train_tokens": len(self.train), "val_tokens": len(self.val) - 1}
        if self.val_bytes is not None:
            counts["val_bytes"] = self.val_bytes
        return {**counts, **self.reading}


def load_tokens(
    text: Callable[[], str | Corpus],
    tokenizer: Tokenizer,
    *,
    context_length: int,
    val_fraction: float,
    cache: Path,
    mask_documents: bool = False,
) -> TokenData:
    """Tokenize a text and split it, or take the tokens that an earlier run left in the cache.

    If the text has no held-out documents, the tail of each document is held out, together
    `val_fraction` of the text, cut at the same places for every tokenizer. `mask_documents`:
    batches say which document each token is of; a document's tokens begin with the separator before
    it. Raises ConfigError if the text is shorter than the context, too small for the vocabulary or
    has no documents to mask, DataError if it cannot be tokenized, DiskError if the cache cannot be
    written.
    """
    content = text()
    corpus = corpus_of(content) if isinstance(content, str) else content
    if mask_documents:
        _check_several(corpus)
    documents, held_out = _fitted(corpus, tokenizer)
    heads, tails, share = whole(documents), whole(held_out), ""
    if not held_out:
        (heads, tails), share = heads_and_tails(documents, val_fraction), f" {val_fraction}"
    several = len(documents) > 1 or len(held_out) > 0
    stored = _Stored(cache, tokenizer, text_hash(documents, held_out), several, mask_documents)
    learning_from = (document.part(start, stop) for document, start, stop in heads)
    tokenizer.learn(learning_from, size_of(heads), f"{stored.text_hash} train{share}", cache)
    end = tokenizer.separator()[1] if several else np.empty(0, np.uint16)
    check = partial(_check_length, context_length)
    train = stored.tokens(_joined(heads, end), check, f"train{share}")
    check(len(train))  # those in the cache may come from a run with a shorter context
    before = end if several else train[len(train) - 1 :]
    val = stored.tokens([before, *_joined(tails, end)], lambda count: count, f"val{share}")
    val = val.part(len(before) - 1, len(val))  # one token of context
    reading = {
        "documents": len(documents),
        "held_out": "documents" if held_out else "tails",
        "separator": tokenizer.separator()[0] if several else None,
        "left_out": sorted(corpus.left_out),
    }
    val_bytes = held_out_bytes(val, tokenizer, end)
    documents_of = (train.documents, val.documents) if mask_documents else (None, None)
    return TokenData(train, val, tokenizer, stored.text_hash, val_bytes, reading, *documents_of)


def _check_several(corpus: Corpus) -> None:
    if max(len(corpus.documents), len(corpus.held_out)) < 2:
        raise ConfigError(
            "data.mask_documents",
            "the text has no two documents to keep apart; leave it out, or give a folder of "
            "several files",
        )


def _fitted(corpus: Corpus, tokenizer: Tokenizer) -> tuple[list[Document], list[Document]]:
    """Return the training and the held-out documents, after fitting the tokenizer to them."""
    seen: list[Document] = []
    pieces = read_through([*corpus.documents, *corpus.held_out], seen)
    between = [SEPARATOR] if len(corpus.documents) > 1 or corpus.held_out else []
    with show_progress("data: reading the text", corpus.size) as advance:
        pieces = with_progress(pieces, advance)
        tokenizer.fit(chain(between, pieces))
        # Read what is left: a tokenizer that has a vocabulary already reads nothing.
        deque(pieces, maxlen=0)
    count = len(corpus.documents)
    return seen[:count], seen[count:]


def _check_length(context_length: int, train: int) -> None:
    """Raise ConfigError if no window fits into that many training tokens."""
    if train < context_length + 1:
        raise ConfigError(
            "model.context_length",
            f"{context_length} is too long for this text: {train:,} of its tokens are for "
            f"training; give at most {max(train - 1, 0):,}, or a longer text",
        )


def _joined(parts: Sequence[Part], separator: Ids) -> list[Part | Ids]:
    """Return the parts with the separator's ids between them."""
    return [item for part in parts for item in (separator, part)][1:]


@dataclass(frozen=True)
class _Stored:
    """The tokens of one text under one tokenizer, in the cache."""

    cache: Path
    tokenizer: Tokenizer
    text_hash: str
    several: bool  # documents, with separators before them
    mask_documents: bool

    def tokens(
        self, parts: Sequence[Part | Ids], check: Callable[[int], object], which: str
    ) -> TokenFile:
        """Return the tokens of `parts`; `check` is as in `cached_tokens`.

        The cache key does not include the parts: `which` tells selections of the same text apart.
        """
        # A subclass of one of our tokenizers inherits the fingerprint, but its code differs.
        code = class_code(type(self.tokenizer))
        made_of = [self.tokenizer.fingerprint(), code, self.text_hash, which]
        key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
        found: list[list[int]] = []  # where documents begin, if the text is encoded now

        def encode() -> Iterator[Ids]:
            found[:] = [[]]
            return self._encoded(parts, found[0])

        def starts() -> NDArray[np.int64]:
            if not found:  # an older version left tokens without them
                deque(encode(), maxlen=0)
            return np.array(found[0], dtype=np.int64)

        tokens = cached_tokens(self.cache, key, encode, check, self.tokenizer.vocab_size)
        if self.mask_documents or (found and self.several):
            tokens = with_starts(tokens, self.cache, key, starts)
        return tokens

    def _encoded(self, parts: Sequence[Part | Ids], starts: list[int]) -> Iterator[Ids]:
        """Yield the ids in pieces; append to `starts` where each separator begins."""
        size = size_of([part for part in parts if not isinstance(part, np.ndarray)])
        count = 0
        with show_progress("data: encoding the text", size) as advance:
            for part in parts:
                if isinstance(part, np.ndarray):
                    starts.append(count)
                    encoded = iter([part])
                else:
                    document, start, stop = part
                    pieces = with_progress(document.part(start, stop), advance)
                    encoded = self.tokenizer.encode_pieces(pieces, "data")
                for ids in encoded:
                    count += len(ids)
                    yield ids


def held_out_bytes(val: TokenFile | TokenRange, tokenizer: Tokenizer, end: Ids) -> int:
    """Return the UTF-8 bytes of the scored tokens, which are all but the first.

    A separator among them, whose ids are `end`, counts as len(SEPARATOR) bytes, whatever the
    tokenizer makes of it.
    """
    lengths = tokenizer.byte_lengths()
    if len(end) == 1:  # an id of its own, which no text has; else it is as long as SEPARATOR
        lengths[end] = len(SEPARATOR)
    return sum(int(lengths[ids].sum()) for ids in val.part(1, len(val)).pieces())
