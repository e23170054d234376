"""Byte-level BPE with the `tokenizers` library: GPT-2's tokenizer, and others of its kind."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from gptattn.data.hub import local_folder
from gptattn.data.tokenizer import MAX_VOCABULARY, Ids, Reader, Tokenizer, utf8
from gptattn.data.tokenizer_files import BPE, FILES, IN_RUN, byte_characters, read_bpe
from gptattn.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
PIECE_CHARS = 2**14  # encoded at a time, roughly
# Cutting a text here, before a space or line feed that follows a non-space, changes no word of
# GPT-2's pattern: no word has whitespace after other characters, and the pattern looks beyond a
# word only after whitespace.
SAFE_CUT = re.compile(r"\S(?=[ \n])")
MIN_VOCABULARY = 257  # the bytes and the end of text
MIN_COUNT = 2  # of a pair: one occurrence is no pattern


class ByteLevelBPE(Tokenizer):
    """A byte-level BPE with GPT-2's way of splitting a text into words. It encodes every text.

    `encode` treats special tokens as ordinary text: `<|endoftext|>` in a text becomes the ids of
    its characters, so that the author of a text cannot smuggle in the special id.

    A subclass calls `_take` or `_read` before the tokenizer is used.
    Source: Radford et al. 2019, sec. 2.2.
    """

    _bpe: BPE
    _folder: Path | None = None  # named by the user

    def _take(self, bpe: BPE) -> None:
        self._bpe, self.vocab_size = bpe, len(bpe.vocab)
        # Built without special tokens, so that the library does not look for them in a text.
        self._library = tokenizers.Tokenizer(models.BPE(bpe.vocab, bpe.merges))
        self._library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def _read(self, path: str, sha256: str | None) -> None:
        """Take the BPE in `path`.

        Raises DataError for files that cannot be used or that have another hash than `sha256`.
        """
        folder = local_folder(path, "tokenizer.path", FILES)
        self._take(read_bpe(folder))
        if sha256 not in (None, self._sha256):
            raise DataError(
                "tokenizer.sha256",
                f"{folder} has other tokens than the recorded ones; give tokenizer.path=FOLDER "
                "with the recorded ones, or tokenizer.sha256=null to use these",
            )
        self._folder = folder.absolute()

    def encode(self, text: str, field: str) -> Ids:
        utf8(text, field)
        return np.concatenate([np.empty(0, np.uint16), *self.encode_batch([*self.cut([text])])])

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(piece.ids, dtype=np.uint16) for piece in encoded]

    def cut(self, pieces: Iterable[str]) -> Iterator[str]:
        return cut_between_words(pieces, PIECE_CHARS)

    def separator(self) -> tuple[str, Ids]:
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
        whole = tokenizers.Tokenizer.from_str(self._library.to_str())
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
    ConfigError without `path`.
    """

    def __init__(self, path: str | None, sha256: str | None = None) -> None:
        if not path:
            raise ConfigError(
                "tokenizer.path",
                "is not set; give a folder with GPT-2's tokenizer files, or set init_from",
            )
        self._read(path, sha256)

    def settings(self) -> dict[str, Any]:
        return {"path": str(self._folder), "sha256": self._sha256}


class TrainedBPE(ByteLevelBPE):
    """`vocab_size` ids: the bytes, the commonest pairs of the training part, and the end of text.

    Pairs are joined within GPT-2's words, the most frequent first. With `path`, a folder as for
    GPT2Tokenizer, nothing is learned, and its tokenizer is used. Raises ConfigError for a size that
    is out of range, beyond what the text gives, or not the folder's; DataError if the tokens' hash
    is not `sha256`.
    Source: Sennrich et al. 2016, arXiv:1508.07909, sec. 3.2, on bytes as in Radford et al. 2019.
    """

    def __init__(self, vocab_size: int, path: str | None = None, sha256: str | None = None) -> None:
        if not MIN_VOCABULARY <= vocab_size <= MAX_VOCABULARY:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{vocab_size} is out of range; give {MIN_VOCABULARY} (the bytes and the end of "
                f"text) to {MAX_VOCABULARY:,}",
            )
        self.vocab_size, self._recorded, self.ready = vocab_size, sha256, path is not None
        if path is not None:
            self._read(path, sha256)
            self._check_size(vocab_size, str(self._folder))

    def _check_size(self, asked: int, where: str) -> None:
        if self.vocab_size != asked:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{asked:,} is not that of {where}; give {self.vocab_size}",
            )

    def fit(self, read: Reader) -> None:
        if self.ready:
            return
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size - 1,
            min_frequency=MIN_COUNT,
            initial_alphabet=byte_characters(),
            show_progress=False,
        )
        words = (piece for document in read("train") for piece in self.cut(document))
        library.train_from_iterator(words, trainer)
        model = json.loads(library.to_str())["model"]
        vocab = model["vocab"] | {END_OF_TEXT: len(model["vocab"])}
        if len(vocab) < self.vocab_size:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{self.vocab_size:,} is more than this text can give; give at most {len(vocab)}, "
                "or a longer text",
            )
        merges = [tuple(pair) for pair in model["merges"]]
        self._become_ready(BPE(vocab, merges, frozenset([END_OF_TEXT])))

    def restore(self, settings: Mapping[str, Any], folder: Path) -> None:
        if not self.ready and (folder / IN_RUN).is_dir():
            asked = self.vocab_size
            self._become_ready(read_bpe(folder))
            self._check_size(asked, str(folder))

    def _become_ready(self, bpe: BPE) -> None:
        self._take(bpe)
        self.ready = True
        if self._recorded not in (None, self._sha256):
            raise DataError(
                "tokenizer.sha256",
                "this text gives other tokens than the recorded ones; give tokenizer.path=RUN with "
                "the recorded ones, or tokenizer.sha256=null to use these",
            )

    def settings(self) -> dict[str, Any]:
        path = None if self._folder is None else str(self._folder)
        return {"vocab_size": self.vocab_size, "path": path, "sha256": self._sha256}

    def fingerprint(self) -> str:
        if self.ready:
            return super().fingerprint()
        return f"bpe {self.vocab_size} {MIN_COUNT} {tokenizers.__version__}"


def cut_between_words(parts: Iterable[str], length: int) -> Iterator[str]:
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
        # Search the last character again, now that its successor is known.
        searched = len(rest) - 1 - start
        rest = rest[start:]
    yield rest
