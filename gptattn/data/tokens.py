"""One memory-mapped file of token ids for each text, with a JSON file next to it.

`make_tokens` writes the ids of any source in constant memory: `tokens.bin` has the training
ids, then the held-out ones, 16 or 32 bits each; `documents.npy` has the places where documents
begin; `tokens.json`, written last, describes the file.
"""

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from gptattn.data.run_data import Request, RunData, Source
from gptattn.data.sampler import Batch, DocumentNumbers, ValidationSet, training_batch
from gptattn.data.tokenizer import FOLDER, SEPARATOR, Ids, Tokenizer, id_type, write_files
from gptattn.errors import ConfigError, DataError
from gptattn.machine.disk import remove_partials, replacing, write_atomically, write_json
from gptattn.machine.source_code import class_code

TOKENS, INDEX, STARTS, LOCK = "tokens.bin", "tokens.json", "documents.npy", ".lock"
FILES = (TOKENS, INDEX, STARTS, FOLDER)
PIECE_TOKENS = 2**20  # read at once


class Index(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON next to a token file."""

    source: str  # hash of everything that decides the ids, except the vocabulary
    recipe: str  # the tokenizer's fingerprint before it read the text
    tokenizer: str  # its fingerprint after
    choice: str  # the tokenizer's name in conf/tokenizer
    settings: dict[str, Any]  # the tokenizer's
    text_sha256: str  # the same for every tokenizer
    tokens: int
    train_tokens: int
    val_start: int  # the first held-out id, which is only context
    val_bytes: int | None  # UTF-8 bytes of the scored tokens; None: there is no text
    documents: int | None  # to train on, if known
    id_bits: int = 16


class TokenData(RunData):
    """Training tokens and held-out tokens of one text, from a token file.

    The request's tokenizer gets the index's vocabulary. Raises ConfigError for too few ids, or if
    there are no documents to keep apart.
    """

    def __init__(
        self, folder: Path, index: Index, request: Request, even_windows: bool = False
    ) -> None:
        self.even_windows = even_windows
        self.tokenizer, self.index = request.tokenizer, index
        self.tokenizer.restore(index.settings, folder)
        self.text_hash, self.val_bytes = index.text_sha256, index.val_bytes
        ids = map_ids(folder / TOKENS, index.id_bits)
        self.train = ids[: index.train_tokens]
        self.val = ids[index.val_start :]  # the first is only context
        if request.val_tokens is not None and request.val_tokens < len(self.val) - 1:
            self.val_limit = request.val_tokens
            self.val = self.val[: self.val_limit + 1]
            self.val_bytes = _count_bytes(self.val[1:], self.tokenizer)
        if index.train_tokens < request.context_length + 1:
            raise ConfigError(
                "model.context_length",
                f"{request.context_length} is too long for this text, which has "
                f"{index.train_tokens:,} training tokens; give at most "
                f"{max(index.train_tokens - 1, 0):,}, or a longer text",
            )
        # Set if documents are kept apart.
        self.train_documents: DocumentNumbers | None = None
        self.val_documents: DocumentNumbers | None = None
        if request.mask_documents:
            starts = np.load(folder / STARTS, mmap_mode="r")
            in_train = (starts > 0) & (starts < index.train_tokens)
            if not (in_train | (starts > index.val_start)).any():
                raise ConfigError(
                    "data.mask_documents",
                    "the text must have two or more documents; set this to false, or give a folder "
                    "of several files, or ids with an end of text and their tokenizer",
                )
            self.train_documents = partial(number_documents, starts, 0)
            self.val_documents = partial(number_documents, starts, index.val_start)

    def training_batch(self, seed: int, step: int, batch_size: int, context_length: int) -> Batch:
        kind = self.train_documents, self.even_windows
        return training_batch(self.train, seed, step, batch_size, context_length, *kind)

    def validation(self, batch_size: int, context_length: int) -> ValidationSet:
        return ValidationSet(self.val, batch_size, context_length, self.val_documents)

    def facts(self) -> dict[str, Any]:
        counts = {"train_tokens": len(self.train), "val_tokens": len(self.val) - 1}
        optional = {"val_bytes": self.val_bytes, "documents": self.index.documents}
        return counts | {name: value for name, value in optional.items() if value is not None}


def number_documents(
    starts: NDArray[np.int64], offset: int, start: int, stop: int
) -> NDArray[np.int64]:
    """Return the document number of each id from `start` to `stop`, both counted from `offset`.

    `starts`: the places where documents begin.
    """
    start, stop = offset + start, offset + stop
    first, last = np.searchsorted(starts, (start + 1, stop))
    return np.searchsorted(starts[first:last], np.arange(start, stop), side="right")


class TokenWriter:
    """Writes the ids to train on, or to hold out, to a file."""

    def __init__(self, file: IO[bytes], tokenizer: Tokenizer) -> None:
        self.file, self.tokenizer = file, tokenizer
        self.tokens = 0
        self.documents: int | None = None  # None: not counted
        self.context = 0  # ids at the beginning that are not scored
        self.starts = array("q")  # where documents begin, after the first

    def write(self, ids: Ids, starts: Iterable[int] = ()) -> None:
        """Write ids; `starts`: the places among them where documents begin."""
        self.starts.extend(self.tokens + start for start in starts)
        self.file.write(ids.astype(id_type(self.tokenizer.vocab_size), copy=False).data)
        self.tokens += len(ids)


class TokenSource(Source):
    """The source of one token file: a text, or ids as they are."""

    name = "the text"  # in messages
    even_windows = False  # a run's training windows are spread evenly over the text

    @abstractmethod
    def stamp(self) -> str:
        """Return a string that changes with the content, without reading all of it."""

    @abstractmethod
    def write_tokens(self, request: Request, train: TokenWriter, val: TokenWriter) -> str:
        """Write the ids of both sides; return the SHA-256 of the content.

        Raises DataError, naming file and place, for what is not text.
        """

    def load(self, request: Request) -> TokenData:
        return TokenData(*_find_tokens(self, request), request, self.even_windows)


def _hash_source(source: TokenSource, request: Request) -> str:
    """Return a hash of everything that decides the ids, except the vocabulary."""
    code = [class_code(type(one)) for one in (source, request.tokenizer)]
    made_of = [source.stamp(), request.val_fraction, *code]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def _find_tokens(source: TokenSource, request: Request) -> tuple[Path, Index]:
    """Return the folder of these ids in the cache, and its index; make the ids if missing.

    In a resumed run, the request has the vocabulary that the first run took from the text.
    """
    made_of, recipe = _hash_source(source, request), request.tokenizer.fingerprint()
    for folder in request.cache.glob(f"{made_of[:32]}-*"):
        with contextlib.suppress(DataError):  # damaged: it is made again
            index = read_index(folder)  # written last, so the ids are whole
            if recipe in (index.recipe, index.tokenizer):
                return folder, index
    name = f"{made_of[:32]}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    return request.cache / name, make_tokens(source, request.cache / name, request)


def make_tokens(source: TokenSource, folder: Path, request: Request) -> Index:
    """Write the token file of a source to `folder`, if missing; return its index.

    Waits for another process that makes it. Raises DataError if it is not text, ConfigError if the
    folder has other ids, DiskError if the disk refuses.
    """
    tokenizer = request.tokenizer
    recipe, source_hash = tokenizer.fingerprint(), _hash_source(source, request)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        print(f"data: waiting for another process that prepares {folder}", file=sys.stderr)
        held = lock.acquire()
    with held:
        with contextlib.suppress(DataError):  # not there, or damaged: it is made again
            index = read_index(folder)
            if index.source == source_hash and recipe in (index.recipe, index.tokenizer):
                return index
            has = "has the ids of another text, or of another tokenizer"
            raise ConfigError("to", f"{folder} {has}; give another folder, or remove it")
        remove_partials(folder, folder / FOLDER)
        with replacing(folder / TOKENS) as file, tempfile.TemporaryFile(dir=folder) as held_out:
            train, val = TokenWriter(file, tokenizer), TokenWriter(held_out, tokenizer)
            text_sha256 = source.write_tokens(request, train, val)
            if not train.tokens or val.tokens <= val.context:  # nothing to score
                raise DataError(
                    "data",
                    f"{source.name} is too short to split into training and held-out text; "
                    "give more text, or separate held-out text",
                )
            held_out.seek(0)
            shutil.copyfileobj(held_out, file)
        starts = np.concatenate([np.asarray(train.starts), np.asarray(val.starts) + train.tokens])
        write_atomically(folder / STARTS, lambda file: np.save(file, starts))
        write_files(folder / FOLDER, tokenizer.files())
        # Without its own context, the first scored id has the last training id as context.
        val_start = train.tokens + val.context - 1
        bits = id_type(tokenizer.vocab_size).itemsize * 8
        index = Index(
            source=source_hash,
            recipe=recipe,
            tokenizer=tokenizer.fingerprint(),
            choice=request.tokenizer_name,
            settings=tokenizer.settings(),
            text_sha256=text_sha256,
            tokens=train.tokens + val.tokens,
            train_tokens=train.tokens,
            val_start=val_start,
            val_bytes=_count_bytes(map_ids(folder / TOKENS, bits)[val_start + 1 :], tokenizer),
            documents=train.documents,
            id_bits=bits,
        )
        write_json(folder / INDEX, index)
    return index


def _count_bytes(ids: Ids, tokenizer: Tokenizer) -> int | None:
    """Return the UTF-8 bytes of these ids, or None if they stand for no text."""
    lengths = tokenizer.byte_lengths()
    if tokenizer.end_of_text is not None:  # counts as the SEPARATOR of other tokenizers
        lengths[tokenizer.end_of_text] = len(SEPARATOR)
    pieces = (ids[i : i + PIECE_TOKENS] for i in range(0, len(ids), PIECE_TOKENS))
    return sum(int(lengths[piece].sum()) for piece in pieces) or None


def read_index(folder: Path) -> Index:
    """Return the index in a folder. Raises DataError if it or its token file is damaged."""
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
        (folder / STARTS).stat()
        if (folder / TOKENS).stat().st_size != index.tokens * index.id_bits // 8:
            raise ValueError(f"{TOKENS} does not match {INDEX}")
        return index
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "data.path", f"{folder} is damaged ({error}); remove it and prepare it again"
        ) from None


def map_ids(path: Path, bits: int) -> Ids:
    """Return the ids of 16 or 32 bits in a file, mapped to memory."""
    return np.memmap(path, f"<u{bits // 8}", "r").view(np.ndarray)


def stamp_file(path: Path) -> str:
    """Return a string that changes with the file: its path, size and modification time."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
