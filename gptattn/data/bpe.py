"""Byte-level BPE with the `tokenizers` library: GPT-2's tokenizer, and others of its kind."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptattn.data import bpe_files
from gptattn.data.bpe_files import BPE, END_OF_TEXT
from gptattn.data.hub import local_folder
from gptattn.data.tokenizer import Tokenizer, utf8
from gptattn.data.tokenizer_files import FILES
from gptattn.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

PIECE_CHARS = 2**14  # encoded at a time, or a few more
BATCH = 64  # pieces per call, shared by the library's threads
# Cutting a text here, before a space or line feed that follows a non-space, changes no word of
# GPT-2's pattern: no word has whitespace after other characters, and the pattern looks beyond a
# word only after whitespace.
SAFE_CUT = re.compile(r"\S(?=[ \n])")


class ByteLevelBPE(Tokenizer):
    """A byte-level BPE with GPT-2's way of splitting a text into words. It encodes every text.

    `encode` treats special tokens as ordinary text: `<|endoftext|>` in a text becomes the ids of
    its characters, so that the author of a text cannot smuggle in the special id.

    A subclass calls `_take` or `_read` before the tokenizer is used. Raises ConfigError without the
    library. Source: Radford et al. 2019, sec. 2.2.
    """

    def __init__(self) -> None:
        try:
            import tokenizers  # noqa: F401
        except ImportError:
            raise ConfigError(
                "tokenizer", "a BPE needs the extra hf: pip install 'gptattn[hf]'"
            ) from None

    def _take(self, bpe: BPE) -> None:
        from tokenizers import Tokenizer as Library
        from tokenizers import models

        self._bpe, self.vocab_size = bpe, len(bpe.vocab)
        # Built without special tokens, so that the library does not look for them in a text.
        self._library = Library(models.BPE(bpe.vocab, bpe.merges))
        self._library.pre_tokenizer = gpt2_words()

    def _read(self, path: str, sha256: str | None) -> Path:
        """Take the BPE in `path`; return its folder.

        Raises DataError for files that cannot be used or that have another hash than `sha256`.
        """
        folder = local_folder(path, "tokenizer.path", FILES)
        self._take(bpe_files.read(folder))
        if sha256 not in (None, self._sha256):
            raise DataError(
                "tokenizer.sha256",
                f"{folder} has other tokens than the recorded ones; give tokenizer.path=FOLDER "
                "with the recorded ones, or tokenizer.sha256=null to use these",
            )
        return folder.absolute()

    def fit(self, pieces: Iterable[str]) -> None:
        pass

    def encode(self, text: str, field: str) -> NDArray[np.uint16]:
        utf8(text, field)
        return np.concatenate([np.empty(0, np.uint16), *self.encode_pieces([text], field)])

    def encode_pieces(self, pieces: Iterable[str], field: str) -> Iterator[NDArray[np.uint16]]:
        words = between_words(pieces, PIECE_CHARS)
        while batch := list(islice(words, BATCH)):
            encoded = self._library.encode_batch_fast(batch, add_special_tokens=False)
            yield np.concatenate([np.array(piece.ids, dtype=np.uint16) for piece in encoded])

    def separator(self) -> tuple[str, NDArray[np.uint16]]:
        end = self._bpe.vocab.get(END_OF_TEXT)
        if end is None:
            return super().separator()
        return END_OF_TEXT, np.array([end], dtype=np.uint16)

    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        tokens = self._bpe.token_bytes
        return b"".join(tokens[id] for id in ids.tolist())

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.array([len(token) for token in self._bpe.token_bytes], dtype=np.int64)

    def fingerprint(self) -> str:
        return f"gpt2 {self._sha256}"

    @cached_property
    def _sha256(self) -> str:
        tokens = [token.hex() for token in self._bpe.token_bytes]
        return hashlib.sha256(json.dumps([tokens, self._bpe.merges]).encode()).hexdigest()

    def files(self) -> dict[str, str]:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders

        whole = Library.from_str(self._library.to_str())
        whole.decoder = decoders.ByteLevel()
        ends = self._bpe.vocab.keys() & {END_OF_TEXT}
        special = self._bpe.special | ends
        whole.add_special_tokens(sorted(special, key=self._bpe.vocab.__getitem__))
        # transformers' GPT2Tokenizer adds a missing end-of-text token, the plain class does not.
        kind = "GPT2Tokenizer" if ends else "PreTrainedTokenizerFast"
        named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) if ends else {}
        config = {"tokenizer_class": kind, "add_prefix_space": False, **named}
        return {
            "tokenizer.json": whole.to_str() + "\n",
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        }


class GPT2Tokenizer(ByteLevelBPE):
    """GPT-2's byte-level BPE, or another of its kind: the one in `path`.

    `path` is a folder with files of `tokenizer_files.FORMS`, a run folder, or `hf:owner/name`.
    Raises DataError for files that cannot be used or that have another hash than `sha256`;
    ConfigError without `path` or the library.
    """

    def __init__(self, path: str | None, sha256: str | None = None) -> None:
        if not path:
            raise ConfigError(
                "tokenizer.path",
                "is not set; give a folder with GPT-2's tokenizer files, or set init_from",
            )
        super().__init__()
        self._folder = self._read(path, sha256)

    def settings(self) -> dict[str, Any]:
        return {"path": str(self._folder), "sha256": self._sha256}


def gpt2_words() -> "pre_tokenizers.PreTokenizer":
    """Return the library's splitting of a text into words, as GPT-2 has it."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def between_words(parts: Iterable[str], length: int) -> Iterator[str]:
    """Yield the text in pieces of at least `length` characters, except the last, cut at SAFE_CUT.

    `parts` is the text cut anywhere. A text without a safe place to cut is one piece.
    """
    rest, searched = "", 0
    for part in parts:
        rest += part
        start = 0
        while cut := SAFE_CUT.search(rest, max(searched, start + length - 1)):
            yield rest[start : cut.end()]
            start = cut.end()
        # The last character is searched again, because its successor was not known yet.
        searched = len(rest) - 1 - start
        rest = rest[start:]
    yield rest
