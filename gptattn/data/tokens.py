"""Turns a text into one memory-mapped file of token ids, with a JSON beside it.

Whatever the source, `make_tokens` writes the ids in constant memory: `tokens.bin` has the training
ids, then the held-out ones, 16 bits each; `documents.npy` says where documents begin;
`tokens.json`, written last, describes the file.
"""

import contextlib
import hashlib
import json
import sys
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from gptattn.data.run_data import Request, RunData, Source
from gptattn.data.sampler import (
    Batch,
    DocumentNumbers,
    Tokens,
    ValidationSet,
    training_batch,
)
from gptattn.data.tokenizer import SEPARATOR, Ids, Tokenizer, utf8
from gptattn.data.tokenizer_files import IN_RUN
from gptattn.data.tokenizer_files import write as write_tokenizer
from gptattn.errors import ConfigError, DataError, DiskError
from gptattn.machine.disk import replacing, write_atomically
from gptattn.machine.lock import is_locked
from gptattn.machine.read_progress import show_progress, with_progress
from gptattn.machine.source_code import class_code

TOKENS, INDEX, STARTS, LOCK = "tokens.bin", "tokens.json", "documents.npy", ".lock"
TOKEN_DTYPE = np.dtype("<u2")
PIECE_TOKENS = 2**20  # read at a time
BATCH = 64  # pieces of text encoded at a time, on all cores if the tokenizer can

Part = tuple[str, str]  # side, "train" or "val", and a piece of text


@dataclass(frozen=True)
class TokenData(RunData):
    """Training tokens and held-out tokens of one text under one tokenizer."""

    train: Tokens
    val: Tokens  # the first token is only context
    tokenizer: Tokenizer
    text_hash: str
    val_bytes: int | None  # UTF-8 bytes of the scored tokens
    documents: int | None = None  # to train on, if known
    train_documents: DocumentNumbers | None = None  # of `train`; given if documents are kept apart
    val_documents: DocumentNumbers | None = None  # of `val`

    def training_batch(self, seed: int, step: int, batch_size: int, context_length: int) -> Batch:
        sizes = batch_size, context_length
        return training_batch(self.train, seed, step, *sizes, self.train_documents)

    def validation(self, batch_size: int, context_length: int) -> ValidationSet:
        return ValidationSet(self.val, batch_size, context_length, self.val_documents)

    def facts(self) -> dict[str, Any]:
        counts = {"train_tokens": len(self.train), "val_tokens": len(self.val) - 1}
        known = {"val_bytes": self.val_bytes, "documents": self.documents}
        return counts | {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class Side:
    """What the JSON says about the training text, or the held-out text."""

    tokens: int
    documents: int
    bytes: int  # of UTF-8, without separators


@dataclass(frozen=True)
class Index:
    """The JSON beside a token file."""

    text: str  # hash of everything that decides the text and its held-out part
    recipe: str  # the tokenizer's fingerprint before it read the text
    tokenizer: str  # and after
    choice: str  # the tokenizer's name in conf/tokenizer
    settings: dict[str, Any]  # the tokenizer's
    text_sha256: str  # whatever the tokenizer
    train: Side
    val: Side
    val_start: int  # the first held-out id, which is only context

    @property
    def val_bytes(self) -> int:
        """UTF-8 bytes of the scored tokens; each separator counts as SEPARATOR, whatever its id."""
        return self.val.bytes + (self.val.documents - 1) * len(SEPARATOR)


class TextSource(Source):
    """A text: documents to train on, and documents or their tails to hold out."""

    name = "the text"  # in messages
    separated = True  # separators stand between documents

    @abstractmethod
    def stamp(self) -> str:
        """Return a string that changes with the text, without reading all of it."""

    @abstractmethod
    def documents(self, val_fraction: float) -> Iterator[Iterable[Part]]:
        """Yield the documents, each in parts: to train on, then to hold out.

        A document is read before the next one is taken. Raises DataError, naming file and place, if
        it is not text.
        """

    def size(self) -> int:
        """Return the bytes of the text, for the progress bar; 0: unknown."""
        return 0

    def load(self, request: Request) -> TokenData:
        cache = request.cache
        try:
            folder = _find_folder(cache, _text_key(self, request), request.tokenizer.fingerprint())
            index = make_tokens(self, folder, request)
        except (OSError, DiskError) as error:
            reason = error.message if isinstance(error, DiskError) else error.strerror
            raise DiskError(
                "cache_dir", f"{cache} cannot be used ({reason}); give another cache_dir"
            ) from None
        return read_tokens(folder, index, request)


def _text_key(source: TextSource, request: Request) -> str:
    """Return a hash of everything but the vocabulary that decides a text's ids."""
    code = [class_code(type(one)) for one in (source, request.tokenizer)]
    made_of = [source.stamp(), request.val_fraction, *code]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def _find_folder(cache: Path, text: str, recipe: str) -> Path:
    """Return the folder of these ids in the cache, which may not be there yet.

    A resumed run asks with the vocabulary that the first run took from the text.
    """
    for folder in cache.glob(f"{text[:32]}-*"):
        with contextlib.suppress(DataError):  # it is made again
            index = read_index(folder)
            if recipe in (index.recipe, index.tokenizer):
                return folder
    return cache / f"{text[:32]}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"


def make_tokens(source: TextSource, folder: Path, request: Request) -> Index:
    """Write the token file of a text to `folder`, if missing; return its index.

    Waits for another process that makes it. Raises DataError if it is not text, ConfigError if the
    folder has other ids, DiskError if the disk refuses.
    """
    tokenizer, fraction = request.tokenizer, request.val_fraction
    recipe, text = tokenizer.fingerprint(), _text_key(source, request)
    folder.mkdir(parents=True, exist_ok=True)
    if is_locked(folder / LOCK):
        print(f"data: waiting for another process that prepares {folder}", file=sys.stderr)
    with FileLock(folder / LOCK):
        with contextlib.suppress(DataError):  # not there, or damaged: it is made again
            index = read_index(folder)
            if index.text == text and recipe in (index.recipe, index.tokenizer):
                return index
            has = "has the ids of another text, or of another tokenizer"
            raise ConfigError("to", f"{folder} {has}; give another folder, or remove it")
        tokenizer.fit(lambda side: _read(source, fraction, side))
        separator = tokenizer.separator() if source.separated else np.empty(0, np.uint16)
        digest = hashlib.sha256()
        with (
            replacing(folder / TOKENS) as file,
            tempfile.TemporaryFile(dir=folder) as held_out,
            show_progress(f"data: encoding {source.name}", source.size()) as advance,
        ):
            # The separator before the first held-out document is its context.
            train, val = _Writer(file, separator, False), _Writer(held_out, separator, True)
            pieces = _cut(tokenizer, source.documents(fraction))
            while batch := list(islice(pieces, BATCH)):
                encoded = tokenizer.encode_batch([piece.text for piece in batch])
                for piece, ids in zip(batch, encoded, strict=True):
                    if piece.begins_document and source.separated:
                        digest.update(f"\0{piece.side}\0".encode())
                    raw = utf8(piece.text, "data")
                    digest.update(raw)
                    (train if piece.side == "train" else val).add(piece, ids, len(raw))
                    advance(len(raw))
            if not (train.tokens and val.tokens):
                raise DataError(
                    "data",
                    f"{source.name} is too short to train on one part of it and hold out another; "
                    "give more of it, or say what is held out",
                )
            held_out.seek(0)
            while raw := held_out.read(2**20):
                file.write(raw)
        starts = np.concatenate([np.asarray(train.starts), np.asarray(val.starts) + train.tokens])
        write_atomically(folder / STARTS, lambda file: np.save(file, starts))
        write_tokenizer(folder / IN_RUN, tokenizer.files())
        index = Index(
            text=text,
            recipe=recipe,
            tokenizer=tokenizer.fingerprint(),
            choice=request.tokenizer_name,
            settings=tokenizer.settings(),
            text_sha256=digest.hexdigest(),
            train=Side(train.tokens, train.documents, train.bytes),
            val=Side(val.tokens, val.documents, val.bytes),
            # One token of context: the last of a separator, or of a single text's training part.
            val_start=train.tokens + len(separator) - 1,
        )
        raw = json.dumps(asdict(index), indent=1, ensure_ascii=False).encode()
        write_atomically(folder / INDEX, lambda file: file.write(raw))
    return index


class Piece(NamedTuple):
    """A piece of a document, with the ids of its own."""

    side: str
    text: str
    begins_document: bool
    begins_part: bool  # of the document: to train on, or to hold out


def _cut(tokenizer: Tokenizer, documents: Iterable[Iterable[Part]]) -> Iterator[Piece]:
    for document in documents:
        begins_document = True
        for side, parts in groupby(document, itemgetter(0)):
            begins_part = True
            for text in tokenizer.cut(text for _, text in parts):
                if text:  # empty documents are left out
                    yield Piece(side, text, begins_document, begins_part)
                    begins_document = begins_part = False


class _Writer:
    """Writes the ids of one side to a file, with a separator between documents."""

    def __init__(self, file: IO[bytes], separator: Ids, leads: bool) -> None:
        self.file, self.separator, self.leads = file, separator.astype(TOKEN_DTYPE), leads
        self.tokens = self.documents = self.bytes = 0
        self.starts = array("q")

    def add(self, piece: Piece, ids: Ids, size: int) -> None:
        """Write the ids of a piece of `size` bytes."""
        if piece.begins_part:
            if len(self.separator) and (self.documents or self.leads):
                self.starts.append(self.tokens)
                self._write(self.separator)
            self.documents += 1
        self.bytes += size
        self._write(ids)

    def _write(self, ids: Ids) -> None:
        self.file.write(ids.astype(TOKEN_DTYPE, copy=False).data)
        self.tokens += len(ids)


def _read(source: TextSource, fraction: float, side: str | None) -> Iterator[Iterable[str]]:
    """Yield the documents of one side or both, as a tokenizer reads them for its vocabulary."""
    if side is None and source.separated:
        yield [SEPARATOR]
    with show_progress(f"data: reading {source.name}", source.size()) as advance:
        for document in source.documents(fraction):
            yield with_progress(
                (text for found, text in document if side in (None, found)), advance
            )


def read_index(folder: Path) -> Index:
    """Return the index in a folder. Raises DataError if it or its token file is damaged."""
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
        (folder / STARTS).stat()
        tokens = index.train.tokens + index.val.tokens
        if (folder / TOKENS).stat().st_size != tokens * TOKEN_DTYPE.itemsize:
            raise ValueError(f"{TOKENS} is not as {INDEX} says")
        return index
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "data.path", f"{folder} is damaged ({error}); remove it and prepare it again"
        ) from None


def read_tokens(folder: Path, index: Index, request: Request) -> TokenData:
    """Return the ids in a folder as the data of a run; its tokenizer takes its vocabulary.

    Raises ConfigError for too few ids, or if there are no documents to keep apart.
    """
    request.tokenizer.restore(index.settings, folder)
    ids = map_ids(folder / TOKENS)
    train, val = ids[: index.train.tokens], ids[index.val_start :]
    check_length(train, request)
    documents: list[DocumentNumbers | None] = [None, None]
    if request.mask_documents:
        if max(index.train.documents, index.val.documents) < 2:
            raise ConfigError(
                "data.mask_documents",
                "the text lacks two documents to keep apart; leave it out, or give a folder of "
                "several files",
            )
        starts = np.load(folder / STARTS, mmap_mode="r")
        documents = [number_documents(starts, offset) for offset in (0, index.val_start)]
    found = index.text_sha256, index.val_bytes, index.train.documents
    return TokenData(train, val, request.tokenizer, *found, *documents)


def check_length(train: Tokens, request: Request) -> None:
    """Raise ConfigError if no window fits the training tokens."""
    if len(train) < request.context_length + 1:
        raise ConfigError(
            "model.context_length",
            f"{request.context_length} is too long for this text: {len(train):,} of its tokens are "
            f"for training; give at most {max(len(train) - 1, 0):,}, or a longer text",
        )


def number_documents(starts: NDArray[np.int64], offset: int) -> DocumentNumbers:
    """Return the numbering of the ids from `offset` on, by the places where documents start."""

    def number(start: int, stop: int) -> NDArray[np.int64]:
        start, stop = offset + start, offset + stop
        first, last = np.searchsorted(starts, (start + 1, stop))
        begins = np.zeros(stop - start, dtype=np.int64)
        begins[starts[first:last] - start] = 1
        return begins.cumsum()

    return number


def map_ids(path: Path, offset: int = 0) -> Ids:
    """Return the ids in a file from byte `offset` on, mapped to memory."""
    return np.memmap(path, TOKEN_DTYPE, "r", offset).view(np.ndarray)


def stamp_file(path: Path) -> str:
    """Return a string that changes with the file: its path, size and modification time."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
