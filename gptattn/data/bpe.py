"""Byte-level BPE with the `tokenizers` library: GPT-2's, a similar one, or one trained here."""

import hashlib
import json
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tokenizers
from msgspec import Meta
from tokenizers import decoders, models, pre_tokenizers, trainers

from gptattn.data.hf_tokenizer import END_OF_TEXT, FILE, HuggingFaceTokenizer, byte_characters
from gptattn.data.hub import local_folder
from gptattn.data.tokenizer import FOLDER, Piece
from gptattn.errors import ConfigError
from gptattn.machine.ending import handle_signals

# Cutting a text here, before a space or line feed that follows a non-space, changes no word of
# GPT-2's pattern: no word has whitespace after other characters, and the pattern looks beyond a
# word only after whitespace.
SAFE_CUT = re.compile(r"\S(?=[ \n])")
MIN_VOCABULARY = 257  # the bytes and the end of text
MIN_COUNT = 2  # of a pair: a single occurrence is no pattern
# The longest word to learn from, in bytes: the library's time is quadratic in a word's length.
MAX_WORD = 1000


class ByteLevelBPE(HuggingFaceTokenizer):
    """A byte-level BPE with GPT-2's way of splitting a text into words. It encodes every text.

    It is read from `path`: a folder with a tokenizer.json, a run folder, or `hf:owner/name`.
    Without `path`, `vocab_size` ids are learned from the training part of the text: the bytes, the
    commonest pairs within words, and the end of text. Words are cut after MAX_WORD bytes.

    `encode` treats special tokens as ordinary text: `<|endoftext|>` in a text becomes the ids of
    its characters, so that a text cannot smuggle in the special id.

    Raises DataError for files that cannot be used, or have other tokens than the hash `sha256`;
    ConfigError for more ids than can be learned from the text.
    Source: Radford et al. 2019, sec. 2.2; to learn: Sennrich et al. 2016, arXiv:1508.07909,
    sec. 3.2.
    """

    _parse_special, _safe_cut = False, SAFE_CUT

    def __init__(
        self,
        path: str | None = None,
        sha256: str | None = None,
        vocab_size: Annotated[int, Meta(ge=MIN_VOCABULARY)] | None = None,
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

    def _take(self, text: str) -> None:
        """Take the tokens. Raises ValueError unless every text has ids and every id has a token."""
        super()._take(text)
        node = json.loads(self._library.to_str())
        model, split = node["model"], node["pre_tokenizer"] or {}
        odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        plain = model["type"] == "BPE" and not any(map(model.get, (*odd, "ignore_merges")))
        as_gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        if not plain or node["normalizer"] or not as_gpt2.items() <= split.items():
            raise ValueError("it is not a byte-level BPE like GPT-2's")
        self._merges, self.end_of_text = model["merges"], self._ids.get(END_OF_TEXT)
        if {*self._ids.values()} != {*range(count := len(self._ids))}:
            raise ValueError(f"the ids of its {count:,} tokens are not 0 to {count - 1:,}")
        if missing := {*byte_characters()} - model["vocab"].keys():
            raise ValueError(f"it has no token for {len(missing)} of the 256 bytes")
        content = [[token.hex() for token in self._bytes], self._merges]
        self._sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        # Without special tokens, so that the library does not find them in a text.
        pairs = [tuple(pair) for pair in self._merges]
        self._library = _make_library(models.BPE(self._ids, pairs))
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
        with handle_signals(signal.SIG_DFL):  # it can take minutes, and lets no handler run
            library.train_from_iterator(train, trainer)
        library.pre_tokenizer = split
        library.add_special_tokens([END_OF_TEXT])
        if (found := library.get_vocab_size()) < self.vocab_size:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{self.vocab_size:,} ids cannot be learned from this text; give at most {found}, "
                "or a longer text",
            )
        self._take(library.to_str())
        self._check_hash("this text")

    def restore(self, settings: Mapping[str, Any], folder: Path) -> None:
        if not self.ready and (folder / FOLDER).is_dir():
            self._read(folder)

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
        whole.add_special_tokens(sorted(self._special, key=self._ids.__getitem__))
        # transformers' GPT2Tokenizer adds a missing end-of-text token, the plain class does not.
        ends = self.end_of_text is not None
        kind = "GPT2Tokenizer" if ends else "PreTrainedTokenizerFast"
        named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) if ends else {}
        config = {"tokenizer_class": kind, "add_prefix_space": False, **named}
        return {
            FILE: whole.to_str() + "\n",
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        }


def _make_library(model: models.BPE) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return library
