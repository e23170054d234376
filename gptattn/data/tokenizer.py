"""Text to token ids and back. Each tokenizer is the `_target_` of one file in `conf/tokenizer`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptattn.errors import ConfigError, DataError
from gptattn.machine.disk import write_atomically

# Text between two documents, for tokenizers without an id for the end of text.
SEPARATOR = "\n\n"
FOLDER = "tokenizer"  # of a tokenizer's files, in a run folder and next to a token file

Ids = NDArray[np.uint16 | np.uint32]  # as `id_type` says


def id_type(vocab_size: int) -> np.dtype[np.uint16 | np.uint32]:
    """Return the type of a vocabulary's ids: 16 bits where they suffice, else 32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class Piece(NamedTuple):
    """A piece of a text."""

    document: int  # its number
    side: str  # "train" or "val"
    text: str


class Tokenizer(ABC):
    """Turns text into the ids 0 .. vocab_size - 1 of a fixed vocabulary, and back."""

    vocab_size: int  # 0: unknown until the text is read
    ready = True  # whether it has its vocabulary
    end_of_text: int | None = None  # the id between documents, if the vocabulary has one

    def fit(self, pieces: Iterable[Piece]) -> None:  # noqa: B027 - most need no text
        """Take the vocabulary from a text, in pieces from `cut`, unless the tokenizer has one."""

    def restore(self, settings: Mapping[str, Any], folder: Path) -> None:  # noqa: B027
        """Take the vocabulary of an earlier `fit`, unless the tokenizer has one.

        `settings`: that tokenizer's `settings()`. `folder`: where its `files()` may be.
        """

    @abstractmethod
    def encode(self, text: str, field: str) -> Ids:
        """Return the ids of the text. Raises DataError, naming `field`, for what has no id."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """Return the ids of each of many pieces of a text."""
        return [self.encode(text, "data") for text in texts]

    def cut(self, texts: Iterable[str]) -> Iterable[str]:
        """Cut a document's pieces anew, so that their ids, joined, are those of the whole."""
        return texts

    def separator(self) -> Ids:
        """Return the ids between two documents."""
        if self.end_of_text is None:
            return self.encode(SEPARATOR, "data")
        return np.array([self.end_of_text], dtype=id_type(self.vocab_size))

    @abstractmethod
    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        """Return the UTF-8 of the ids; it may begin or end in the middle of a character."""

    def decode(self, ids: NDArray[np.integer]) -> str:
        """Return the text of the ids; invalid UTF-8 becomes U+FFFD."""
        return self.to_bytes(ids).decode("utf-8", errors="replace")

    @abstractmethod
    def byte_lengths(self) -> NDArray[np.int64]:
        """Return the number of UTF-8 bytes of each id [vocab_size], for bits per byte."""

    def settings(self) -> dict[str, Any]:
        """Return arguments that rebuild this tokenizer with its vocabulary, without the text."""
        return {}

    def files(self) -> dict[str, str]:
        """Return files to save with weights, name -> text, if `settings` alone are not enough."""
        return {}

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that differs between tokenizers that may give a text different ids.

        Before `fit`, it describes how the vocabulary will be made.
        """


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 ids, which can encode every text."""

    vocab_size = 256

    def encode(self, text: str, field: str) -> Ids:
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
        self._set([characters or ""])

    def _set(self, texts: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(chain.from_iterable(texts))))
        self.vocab_size = len(self.characters)
        self.ready = self.vocab_size > 0
        # A table by code point: searching the sorted ones takes twenty times longer.
        self._ids = np.full(sys.maxunicode + 1, -1, dtype=np.int32)
        self._ids[_code_points(self.characters)] = np.arange(self.vocab_size)

    def fit(self, pieces: Iterable[Piece]) -> None:
        if not self.ready:
            self._set(piece.text for piece in pieces)

    def restore(self, settings: Mapping[str, Any], folder: Path) -> None:
        if not self.ready:
            self._set([settings.get("characters", "")])

    def encode(self, text: str, field: str) -> Ids:
        ids = self._ids[_code_points(text)]
        if (unknown := ids < 0).any():
            first = int(np.argmax(unknown))
            after = f", after {text[max(first - 20, 0) : first]!r}," if first else ""
            raise DataError(
                field,
                f"character {text[first]!r} (U+{ord(text[first]):04X}){after} is not among the "
                f"{self.vocab_size} characters of tokenizer=char; leave it out, or use "
                "tokenizer=byte",
            )
        return ids.astype(id_type(self.vocab_size))

    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        text = "".join(self.characters[id] for id in ids.tolist())
        return text.encode("utf-8", "surrogatepass")

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.array([len(c.encode("utf-8", "surrogatepass")) for c in self.characters])

    def settings(self) -> dict[str, Any]:
        return {"characters": self.characters}

    def fingerprint(self) -> str:
        return f"char {self.characters}"


class TaskIds(Tokenizer):
    """Ids without a text: from a synthetic task, or from files without a tokenizer."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size or 0

    def fit(self, pieces: Iterable[Piece]) -> None:
        raise ConfigError("tokenizer", "none cannot encode text; for text, use tokenizer=byte")

    def encode(self, text: str, field: str) -> Ids:
        what = "on a synthetic task, or on ids with tokenizer=none"
        raise DataError(field, f"the run has no tokenizer: it trained {what}; use a run on text")

    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        return " ".join(map(str, ids.tolist())).encode()

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.zeros(self.vocab_size, dtype=np.int64)

    def settings(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size}

    def fingerprint(self) -> str:
        return f"task {self.vocab_size}"


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> Ids:
    """Return the prompt's ids; an empty prompt becomes a line feed.

    Raises DataError for an unknown character.
    """
    return tokenizer.encode(prompt or "\n", "sample.prompt")


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write a tokenizer's `files()` to a folder."""
    for name, text in files.items():
        raw = text.encode()
        write_atomically(folder / name, lambda file, raw=raw: file.write(raw))


def utf8(text: str, field: str) -> bytes:
    """Return the text's UTF-8.

    Raises DataError for a lone surrogate, which a terminal without UTF-8 can produce.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            field, f"cannot be written as UTF-8 at offset {error.start}; give UTF-8 text"
        ) from None


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
