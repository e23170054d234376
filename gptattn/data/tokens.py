"""The tokens of a text on disk, as a memory map keyed by content, split for training."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptattn.data.tokenizer import Tokenizer
from gptattn.disk import remove_leftovers, write_atomically
from gptattn.errors import ConfigError, DiskError

TOKEN_DTYPE = np.dtype("<u2")
CACHED = r"[0-9a-f]{64}-[0-9a-f]{64}\.tokens|tinyshakespeare\.txt"  # names in the cache folder


@dataclass(frozen=True)
class TokenData:
    """Training tokens and the held-out tail of one text under one tokenizer.

    `text_hash` and `tokenizer` name the content: runs compare only where both agree.
    """

    train: NDArray[np.uint16]
    val: NDArray[np.uint16]
    tokenizer: Tokenizer
    text_hash: str
    val_bytes: int  # UTF-8 bytes that the scored tokens stand for


def load_tokens(
    text: Callable[[], str],
    tokenizer: Tokenizer,
    *,
    context_length: int,
    val_fraction: float,
    cache: Path,
) -> TokenData:
    """Tokenize, or map what an earlier run left; then split off the tail for validation.

    Raises ConfigError where the text is shorter than the context, DataError where it cannot be
    tokenized, DiskError where the cache cannot be written.
    """
    content = text()
    tokenizer.fit(content)
    text_hash = hashlib.sha256(content.encode("utf-8")).hexdigest()
    key = hashlib.sha256(f"{tokenizer.fingerprint()}\0{text_hash}".encode()).hexdigest()
    tokens = _cached_tokens(
        cache,
        key,
        lambda: tokenizer.encode(content, "data"),
        # Too short a text must leave nothing behind.
        lambda ids: _check_length(len(ids), context_length, val_fraction),
        tokenizer.vocab_size,
    )
    cut = _check_length(len(tokens), context_length, val_fraction)
    val = tokens[cut - 1 :]  # one token of context, so that the tail's first token is scored
    val_bytes = int(tokenizer.byte_lengths()[val[1:]].sum())
    return TokenData(tokens[:cut], val, tokenizer, text_hash, val_bytes)


def _check_length(tokens: int, context_length: int, val_fraction: float) -> int:
    """Where validation starts; raises ConfigError where no training window fits before it."""
    cut = tokens - max(1, round(tokens * val_fraction))
    if cut < context_length + 1:
        raise ConfigError(
            "model.context_length",
            f"{context_length} is too long for this text: {tokens:,} tokens, {max(cut, 0):,} of "
            f"them for training; at most {max(cut - 1, 0):,}, or a longer text",
        )
    return cut


def _cached_tokens(
    folder: Path,
    key: str,
    encode: Callable[[], NDArray[np.uint16]],
    check: Callable[[NDArray[np.uint16]], object],
    vocab_size: int,
) -> NDArray[np.uint16]:
    """Map `<key>-<sha256>.tokens`; where there is none that is whole, encode and write it."""
    try:
        remove_leftovers(folder, CACHED)
        for file in folder.glob(f"{key}-*.tokens"):
            tokens = _whole(file, vocab_size)
            if tokens is not None:
                return tokens
        ids = encode().astype(TOKEN_DTYPE)
        check(ids)
        file = folder / f"{key}-{hashlib.sha256(ids.tobytes()).hexdigest()}.tokens"
        write_atomically(file, lambda target: target.write(ids.data))
        return np.memmap(file, dtype=TOKEN_DTYPE, mode="r")
    except (OSError, DiskError) as error:
        reason = error.message if isinstance(error, DiskError) else error.strerror
        raise DiskError(
            "cache_dir", f"{folder} cannot be used ({reason}); give another cache_dir"
        ) from None


def _whole(file: Path, vocab_size: int) -> NDArray[np.uint16] | None:
    """The file's tokens, mapped; None where it is not what was written, or holds other ids."""
    size = file.stat().st_size if file.is_file() else 0
    if size == 0 or size % TOKEN_DTYPE.itemsize:
        return None
    tokens = np.memmap(file, dtype=TOKEN_DTYPE, mode="r")
    same = hashlib.sha256(tokens.data).hexdigest() == file.stem.rpartition("-")[2]
    return tokens if same and int(tokens.max()) < vocab_size else None
