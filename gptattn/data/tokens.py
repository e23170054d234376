"""Turns a text into tokens, split into training tokens and held-out tokens."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gptattn.data.corpus import (
    Corpus,
    Document,
    Part,
    corpus_of,
    heads_and_tails,
    read_through,
    text_hash,
    whole,
)
from gptattn.data.run_data import RunData
from gptattn.data.sampler import Batch, Rows, ValidationSet, opening_rows, training_batch
from gptattn.data.token_files import TokenFile, Tokens, cached_tokens
from gptattn.data.tokenizer import SEPARATOR, Tokenizer
from gptattn.errors import ConfigError
from gptattn.machine.source_code import class_code


@dataclass(frozen=True)
class TokenData(RunData):
    """Training tokens and held-out tokens of one text under one tokenizer."""

    train: Tokens
    val: Tokens  # the first token is only context, the others are scored
    tokenizer: Tokenizer
    text_hash: str
    val_bytes: int | None  # UTF-8 bytes that the scored tokens stand for
    reading: Mapping[str, Any] = field(default_factory=dict)  # facts for the run's record

    def training_batch(
        self,
        seed: int,
        step: int,
        batch_size: int,
        context_length: int,
        rows: Rows | None = None,
    ) -> Batch:
        return training_batch(self.train, seed, step, batch_size, context_length, rows)

    def validation(self, batch_size: int, context_length: int) -> ValidationSet:
        return ValidationSet(self.val, batch_size, context_length)

    def opening_rows(self, context_length: int, tokens: int) -> Tensor:
        return opening_rows(self.val, context_length, tokens)

    @property
    def val_tokens(self) -> int:
        return len(self.val)

    @property
    def scored(self) -> float:
        return 1.0

    def facts(self) -> dict[str, Any]:
        return {
            "train_tokens": len(self.train),
            "val_tokens": len(self.val) - 1,
            "val_bytes": self.val_bytes,
            **self.reading,
        }


def load_tokens(
    text: Callable[[], str | Corpus],
    tokenizer: Tokenizer,
    *,
    context_length: int,
    val_fraction: float,
    cache: Path,
) -> TokenData:
    """Tokenize a text and split it, or take the tokens that an earlier run left in the cache.

    If the text has no held-out documents, the tail of each document is held out, together
    `val_fraction` of the text. Raises ConfigError if the text is shorter than the context,
    DataError if it cannot be tokenized, DiskError if the cache cannot be written.
    """
    content = text()
    corpus = corpus_of(content) if isinstance(content, str) else content
    documents, held_out = _fitted(corpus, tokenizer)
    stored = _Stored(cache, tokenizer, text_hash(documents, held_out))
    several = len(documents) > 1 or len(held_out) > 0
    if several:
        split = _by_document(stored, documents, held_out, context_length, val_fraction)
    else:
        split = _by_tail(stored, documents[0], context_length, val_fraction)
    reading = {
        "documents": len(documents),
        "held_out": "documents" if held_out else "tails",
        "separator": tokenizer.separator()[0] if several else None,
        "left_out": sorted(corpus.left_out),
    }
    return TokenData(
        split.train, split.val, tokenizer, stored.text_hash, _bytes(split, tokenizer), reading
    )


@dataclass(frozen=True)
class _Split:
    train: TokenFile
    val: TokenFile
    separators: int = 0  # among the scored tokens of `val`


def _by_tail(
    stored: "_Stored", document: Document, context_length: int, val_fraction: float
) -> _Split:
    def cut(count: int) -> int:
        return _checked(count - max(1, round(count * val_fraction)), context_length)

    tokens = stored.tokens(whole([document]), cut)
    end = cut(len(tokens))
    return _Split(tokens.part(0, end), tokens.part(end - 1, len(tokens)))


def _by_document(
    stored: "_Stored",
    documents: Sequence[Document],
    held_out: Sequence[Document],
    context_length: int,
    val_fraction: float,
) -> _Split:
    heads, tails, share = whole(documents), whole(held_out), ""
    if not held_out:
        (heads, tails), share = heads_and_tails(documents, val_fraction), f" {val_fraction}"
    train = stored.tokens(
        _separated(heads)[1:], lambda count: _checked(count, context_length), f"train{share}"
    )
    val = stored.tokens(_separated(tails), lambda count: count, f"val{share}")
    # The context token is the last token of the separator before the first tail.
    context = len(stored.tokenizer.separator()[1]) - 1
    return _Split(train, val.part(context, len(val)), len(tails) - 1)


def _fitted(corpus: Corpus, tokenizer: Tokenizer) -> tuple[list[Document], list[Document]]:
    """Return the training and the held-out documents, after fitting the tokenizer to them."""
    seen: list[Document] = []
    pieces = read_through([*corpus.documents, *corpus.held_out], seen)
    between = [SEPARATOR] if len(corpus.documents) > 1 or corpus.held_out else []
    tokenizer.fit(chain(between, pieces))
    # Read what is left: a tokenizer that has a vocabulary already reads nothing.
    deque(pieces, maxlen=0)
    count = len(corpus.documents)
    return seen[:count], seen[count:]


def _checked(train: int, context_length: int) -> int:
    """Return the number of training tokens. Raises ConfigError if no window fits into them."""
    if train < context_length + 1:
        raise ConfigError(
            "model.context_length",
            f"{context_length} is too long for this text: {max(train, 0):,} of its tokens are for "
            f"training; give at most {max(train - 1, 0):,}, or a longer text",
        )
    return train


def _separated(parts: Sequence[Part]) -> list[Part | None]:
    """Return the parts, each after a None that stands for the separator."""
    return [item for part in parts for item in (None, part)]


@dataclass(frozen=True)
class _Stored:
    """The tokens of one text under one tokenizer, in the cache."""

    cache: Path
    tokenizer: Tokenizer
    text_hash: str

    def tokens(
        self, parts: Sequence[Part | None], check: Callable[[int], object], which: str = ""
    ) -> TokenFile:
        """Return the tokens of `parts`; `check` is as in `cached_tokens`.

        The cache key does not include the parts: `which` tells selections of the same text apart.
        """
        # A subclass of one of our tokenizers inherits the fingerprint, but its code differs.
        code = class_code(type(self.tokenizer))
        made_of = [self.tokenizer.fingerprint(), code, self.text_hash, *filter(None, [which])]
        key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
        return cached_tokens(
            self.cache, key, lambda: self._encoded(parts), check, self.tokenizer.vocab_size
        )

    def _encoded(self, parts: Sequence[Part | None]) -> Iterator[NDArray[np.uint16]]:
        for part in parts:
            if part is None:
                yield self.tokenizer.separator()[1]
            else:
                document, start, stop = part
                yield from self.tokenizer.encode_pieces(document.part(start, stop), "data")


def _bytes(split: _Split, tokenizer: Tokenizer) -> int:
    """Return the UTF-8 bytes of the scored tokens.

    A separator counts as len(SEPARATOR) bytes, whatever the tokenizer makes of it.
    """
    lengths = tokenizer.byte_lengths()
    scored = split.val.part(1, len(split.val))
    count = sum(int(lengths[ids].sum()) for ids in scored.pieces())
    if split.separators:
        own = int(lengths[tokenizer.separator()[1]].sum())
        count -= split.separators * (own - len(SEPARATOR))
    return count
