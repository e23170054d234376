"""Byte-level BPE with the `tokenizers` library: GPT-2's, a similar one, or one trained here."""

import hashlib
import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tokenizers
from msgspec import Meta
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from gptattn.data.hub import local_folder
from gptattn.data.tokenizer import FOLDER, MAX_VOCABULARY, Ids, Piece, Tokenizer, utf8
from gptattn.errors import ConfigError, DataError
from gptattn.machine.ending import handle_signals

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
PIECE_CHARS = 2**14  # encoded at a time, roughly
# Cutting a text here, before a space or line feed that follows a non-space, changes no word of
# GPT-2's pattern: no word has whitespace after other characters, and the pattern looks beyond a
# word only after whitespace.
SAFE_CUT = re.compile(r"\S(?=[ \n])")
MIN_VOCABULARY = 257  # the bytes and the end of text
MIN_COUNT = 2  # of a pair: one occurrence is no pattern
# The longest word to learn from, in bytes: the library's time is quadratic in a word's length.
MAX_WORD = 1000


class ByteLevelBPE(Tokenizer):
    """A byte-level BPE with GPT-2's way of splitting a text into words. It encodes every text.

    It is read from `path`: a folder with a tokenizer.json, a run folder, or `hf:owner/name`.
    Without `path`, `vocab_size` ids are learned from the training part of the text: the bytes, the
    commonest pairs within words, and the end of text. Words are cut after MAX_WORD bytes.

    `encode` treats special tokens as ordinary text: `<|endoftext|>` in a text becomes the ids of
    its characters, so that a text cannot smuggle in the special id.

    Raises DataError for files that cannot be used, or whose tokens' hash is not `sha256`;
    ConfigError for a size beyond what the text gives.
    Source: Radford et al. 2019, sec. 2.2; to learn: Sennrich et al. 2016, arXiv:1508.07909,
    sec. 3.2.
    """

    def __init__(
        self,
        path: str | None = None,
        sha256: str | None = None,
        vocab_size: Annotated[int, Meta(ge=MIN_VOCABULARY, le=MAX_VOCABULARY)] | None = None,
    ) -> None:
        self._trained_size, self._recorded, self._folder = vocab_size, sha256, None
        self.ready = bool(path)
        if path:
            self._folder = local_folder(path, "tokenizer.path", [FILE]).absolute()
            self._read(self._folder)
        elif vocab_size is None:
            raise ConfigError(
                "tokenizer.path",
                f"is not set; give a folder with GPT-2's {FILE}, or set init_from",
            )
        else:
            self.vocab_size = vocab_size

    def _read(self, folder: Path) -> None:
        file = find_file(folder)
        if file is None:
            raise DataError(
                "tokenizer.path",
                f"{folder} has no {FILE}, which transformers' save_pretrained writes; give a "
                "folder that has it, or hf:owner/name",
            )
        try:
            self._take(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises its errors as this class
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise DataError("tokenizer.path", f"{file} cannot be used ({reason})") from None
        self._check_hash(str(folder))

    def _check_hash(self, where: str) -> None:
        if self._recorded not in (None, self._sha256):
            raise DataError(
                "tokenizer.sha256",
                f"{where} has other tokens than the recorded ones; give tokenizer.path=FOLDER "
                "with the recorded ones, or tokenizer.sha256=null to use these",
            )

    def _take(self, library: tokenizers.Tokenizer) -> None:
        """Take the tokens. Raises ValueError unless every text has ids, and every id a token."""
        node = json.loads(library.to_str())
        model, split = node["model"], node["pre_tokenizer"] or {}
        odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        plain = model["type"] == "BPE" and not any(map(model.get, (*odd, "ignore_merges")))
        as_gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        if not plain or node["normalizer"] or not as_gpt2.items() <= split.items():
            raise ValueError("it is not a byte-level BPE like GPT-2's")
        added = {token["content"] for token in node["added_tokens"]}
        self._vocab, self._merges = library.get_vocab(), model["merges"]
        self.end_of_text = self._vocab.get(END_OF_TEXT)
        self.vocab_size = len(self._vocab)
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(f"it has {self.vocab_size:,} tokens, more than {MAX_VOCABULARY:,}")
        if sorted(self._vocab.values()) != list(range(self.vocab_size)):
            has = f"its {self.vocab_size:,} tokens"
            raise ValueError(f"the ids of {has} are not 0 to {self.vocab_size - 1:,}")
        tokens = sorted(self._vocab, key=self._vocab.__getitem__)
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        if missing := byte_of.keys() - library.get_vocab(with_added_tokens=False):
            raise ValueError(f"it has no token for {len(missing)} of the 256 bytes")
        # Tokens in plain text.
        self._special = {t for t in tokens if t in added or not byte_of.keys() >= set(t)}
        self._bytes = [
            token.encode() if token in self._special else bytes(byte_of[c] for c in token)
            for token in tokens
        ]
        content = [[token.hex() for token in self._bytes], self._merges]
        self._sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        # Without special tokens, so that the library does not look for them in a text.
        pairs = [tuple(pair) for pair in self._merges]
        self._library = _make_library(models.BPE(self._vocab, pairs))
        self.ready = True

    def fit(self, pieces: Iterable[Piece]) -> None:
        if self.ready:
            return
        library = _make_library(models.BPE())
        split = library.pre_tokenizer
        short = pre_tokenizers.FixedLength(MAX_WORD)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, short])
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size - 1,
            min_frequency=MIN_COUNT,
            initial_alphabet=byte_characters(),
            show_progress=False,
        )
        train = (piece.text for piece in pieces if piece.side == "train")
        print(f"data: learning {self.vocab_size:,} tokens", file=sys.stderr)
        with handle_signals(signal.SIG_DFL):  # it may take minutes, and lets no handler run
            library.train_from_iterator(train, trainer)
        library.pre_tokenizer = split
        library.add_special_tokens([END_OF_TEXT])
        if (found := library.get_vocab_size()) < self.vocab_size:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{self.vocab_size:,} is more than this text can give; give at most {found}, "
                "or a longer text",
            )
        self._take(library)
        self._check_hash("this text")

    def restore(self, settings: Mapping[str, Any], folder: Path) -> None:
        if not self.ready and (folder / FOLDER).is_dir():
            self._read(folder)

    def encode(self, text: str, field: str) -> Ids:
        utf8(text, field)
        (ids,) = self.encode_batch([text])
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(piece.ids, dtype=np.uint16) for piece in encoded]

    def cut(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield pieces of at least PIECE_CHARS characters, except the last, cut at SAFE_CUT.

        A text without a safe place to cut is one piece.
        """
        rest, searched = "", 0
        for text in texts:
            rest += text
            start = 0
            while cut := SAFE_CUT.search(rest, max(searched, start + PIECE_CHARS - 1)):
                yield rest[start : cut.end()]
                start = cut.end()
            # Search the last character again, now that its successor is known.
            searched = len(rest) - 1 - start
            rest = rest[start:]
        yield rest

    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        return b"".join(self._bytes[id] for id in ids.tolist())

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.array([len(token) for token in self._bytes], dtype=np.int64)

    def settings(self) -> dict[str, Any]:
        path = None if self._folder is None else str(self._folder)
        size = {} if self._trained_size is None else {"vocab_size": self.vocab_size}
        return {**size, "path": path, "sha256": self._sha256}

    def fingerprint(self) -> str:
        if self.ready:
            return f"gpt2 {self._sha256}"
        return f"bpe {self.vocab_size} {MIN_COUNT} {MAX_WORD} {tokenizers.__version__}"

    def files(self) -> dict[str, str]:
        whole = tokenizers.Tokenizer.from_str(self._library.to_str())
        whole.decoder = decoders.ByteLevel()
        whole.add_special_tokens(sorted(self._special, key=self._vocab.__getitem__))
        # transformers' GPT2Tokenizer adds a missing end-of-text token, the plain class does not.
        ends = self.end_of_text is not None
        kind = "GPT2Tokenizer" if ends else "PreTrainedTokenizerFast"
        named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) if ends else {}
        config = {"tokenizer_class": kind, "add_prefix_space": False, **named}
        return {
            FILE: whole.to_str() + "\n",
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        }


def find_file(folder: Path) -> Path | None:
    """Return the tokenizer.json in `folder` or `folder/tokenizer`; None if there is none."""
    files = (folder / FILE, folder / FOLDER / FILE)
    return next((file for file in files if file.is_file()), None)


def _make_library(model: models.BPE) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return library


def byte_characters() -> list[str]:
    """Return the character for each byte [256]: the byte's own if printable, else from U+0100 on.

    Source: Radford et al. 2019, `bytes_to_unicode` of their encoder.py.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]
