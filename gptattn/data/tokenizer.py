"""Text to token ids and back. Each tokenizer is the `_target_` of one file in `conf/tokenizer`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptattn.errors import ConfigError, DataError

MAX_VOCABULARY = 2**16  # token files hold 16-bit ids
# Text between two documents, for a tokenizer that has no separator id of its own.
SEPARATOR = "\n\n"


class Tokenizer(ABC):
    """Turns text into the ids 0 .. vocab_size - 1 of a fixed vocabulary, and back."""

    vocab_size: int

    @property
    def ready(self) -> bool:
        """Whether it has its vocabulary, whatever the text."""
        return True

    @abstractmethod
    def fit(self, pieces: Iterable[str]) -> None:
        """Build the vocabulary from a text in pieces, unless the tokenizer has one already."""

    def learn(
        self, documents: Iterable[Iterable[str]], size: int, content: str, cache: Path
    ) -> None:
        """Build the vocabulary from the training documents alone, if it is not built by `fit`.

        They have about `size` bytes and are read in pieces. `content` is a string that differs
        between other documents, so that what was learned can be kept in the folder `cache`.
        """
        return

    @abstractmethod
    def encode(self, text: str, field: str) -> NDArray[np.uint16]:
        """Return the ids of the text. Raises DataError, naming `field`, for what has no id."""

    def encode_pieces(self, pieces: Iterable[str], field: str) -> Iterator[NDArray[np.uint16]]:
        """Yield the ids of a text in pieces; joined, they are those of the whole text."""
        for piece in pieces:
            yield self.encode(piece, field)

    def separator(self) -> tuple[str, NDArray[np.uint16]]:
        """Return the text between two documents, and its ids."""
        return SEPARATOR, self.encode(SEPARATOR, "data")

    @abstractmethod
    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        """Return the UTF-8 of the ids; it may begin or end in the middle of a character."""

    def decode(self, ids: NDArray[np.integer]) -> str:
        """Return the text of the ids; what is not valid UTF-8 becomes U+FFFD."""
        return self.to_bytes(ids).decode("utf-8", errors="replace")

    @abstractmethod
    def byte_lengths(self) -> NDArray[np.int64]:
        """Return the number of UTF-8 bytes of each id [vocab_size], for bits per byte."""

    def settings(self) -> dict[str, Any]:
        """Return arguments that rebuild this tokenizer with its vocabulary, without the text."""
        return {}

    def files(self) -> dict[str, str]:
        """Return files to keep beside weights, name -> text, if `settings` alone are not enough."""
        return {}

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that differs between tokenizers that may give a text different ids."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 ids, which can encode every text."""

    vocab_size = 256

    def fit(self, pieces: Iterable[str]) -> None:
        pass

    def encode(self, text: str, field: str) -> NDArray[np.uint16]:
        return np.frombuffer(utf8(text, field), dtype=np.uint8).astype(np.uint16)

    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        return ids.astype(np.uint8).tobytes()

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.ones(256, dtype=np.int64)

    def fingerprint(self) -> str:
        return "byte"


class CharTokenizer(Tokenizer):
    """One id per character, in the order of code points.

    The vocabulary is `characters`, or by default the characters of the text.
    """

    def __init__(self, characters: str | None = None) -> None:
        if characters == "":
            raise DataError("tokenizer.characters", "is empty; give null for those of the text")
        self._given = characters is not None
        self._set([characters or ""])

    @property
    def ready(self) -> bool:
        return self._given

    def _set(self, pieces: Iterable[str]) -> None:
        found = np.zeros(sys.maxunicode + 1, dtype=bool)
        for piece in pieces:
            found[_code_points(piece)] = True
        self._codes = np.flatnonzero(found).astype(np.uint32)
        self.vocab_size = len(self._codes)
        # A table by code point: searching the sorted codes takes twenty times as long.
        self._ids = np.full(sys.maxunicode + 1, -1, dtype=np.int32)
        self._ids[self._codes] = np.arange(self.vocab_size)

    def fit(self, pieces: Iterable[str]) -> None:
        if not self._given:
            self._set(pieces)
        if self.vocab_size > MAX_VOCABULARY:
            raise DataError(
                "tokenizer",
                f"the text has {self.vocab_size:,} distinct characters, more than "
                f"{MAX_VOCABULARY:,}; use tokenizer=byte",
            )

    def encode(self, text: str, field: str) -> NDArray[np.uint16]:
        return self._encode(text, field, 0)

    def encode_pieces(self, pieces: Iterable[str], field: str) -> Iterator[NDArray[np.uint16]]:
        offset = 0
        for piece in pieces:
            yield self._encode(piece, field, offset)
            offset += len(piece)

    def _encode(self, text: str, field: str, offset: int) -> NDArray[np.uint16]:
        """Encode a piece; `offset`, its place in the document, is for the error message."""
        ids = self._ids[_code_points(text)]
        unknown = ids < 0
        if unknown.any():
            first = int(np.argmax(unknown))
            character = text[first]
            raise DataError(
                field,
                f"character {character!r} (U+{ord(character):04X}) at offset {offset + first} is "
                f"not among the {self.vocab_size} that the char tokenizer knows; leave it out or "
                "use tokenizer=byte",
            )
        return ids.astype(np.uint16)

    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        return "".join(map(chr, self._codes[ids])).encode("utf-8", "surrogatepass")

    def byte_lengths(self) -> NDArray[np.int64]:
        # UTF-8 takes 1 byte below U+0080, 2 below U+0800, 3 below U+10000, else 4.
        limits = np.array([0x80, 0x800, 0x10000])
        return np.searchsorted(limits, self._codes, side="right").astype(np.int64) + 1

    def settings(self) -> dict[str, Any]:
        return {"characters": "".join(map(chr, self._codes))}

    def fingerprint(self) -> str:
        return "char " + "".join(map(chr, self._codes))


class TaskIds(Tokenizer):
    """The ids of a synthetic task, which stand for no text. The task says how many there are."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size or 0  # not known yet

    def become(self, vocab_size: int) -> None:
        """Take the vocabulary of the task. Raises ConfigError if another one was given."""
        if self.vocab_size not in (0, vocab_size):
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{self.vocab_size} is not the task's {vocab_size}; set data.vocab_size alone",
            )
        self.vocab_size = vocab_size

    def fit(self, pieces: Iterable[str]) -> None:
        raise ConfigError("tokenizer", "none is for synthetic tasks; for text, use tokenizer=byte")

    def encode(self, text: str, field: str) -> NDArray[np.uint16]:
        raise DataError(field, "the run is of a synthetic task, whose ids stand for no text")

    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        return " ".join(map(str, ids.tolist())).encode()

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.zeros(self.vocab_size, dtype=np.int64)

    def settings(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size}

    def fingerprint(self) -> str:
        return f"task {self.vocab_size}"


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> NDArray[np.uint16]:
    """Return the prompt's ids; an empty prompt becomes a line feed.

    Raises DataError for an unknown character.
    """
    return tokenizer.encode(prompt or "\n", "sample.prompt")


def utf8(text: str, field: str) -> bytes:
    """Return the text's UTF-8.

    Raises DataError for a lone surrogate, which a terminal that does not use UTF-8 can produce.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            field, f"cannot be written as UTF-8 at offset {error.start}; give UTF-8 text"
        ) from None


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
