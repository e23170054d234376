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
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor

from gptattn.data.run_data import Index, Request, RunData, Side, Source
from gptattn.data.sampler import (
    Batch,
    DocumentNumbers,
    Rows,
    Tokens,
    ValidationSet,
    opening_rows,
    training_batch,
)
from gptattn.data.tokenizer import SEPARATOR, Ids, Tokenizer, utf8
from gptattn.data.tokenizer_files import IN_RUN
from gptattn.data.tokenizer_files import write as write_tokenizer
from gptattn.errors import ConfigError, DataError, DiskError
from gptattn.machine.disk import replacing, write_atomically
from gptattn.machine.read_progress import show_progress, with_progress
from gptattn.machine.source_code import class_code

TOKENS, INDEX, STARTS, LOCK = "tokens.bin", "tokens.json", "documents.npy", ".lock"
TOKEN_DTYPE = np.dtype("<u2")
PIECE_TOKENS = 2**20  # read at a time
BATCH_CHARS = 2**20  # encoded at a time
QUIET_SECONDS = 3.0  # of waiting for another process
LARGE = 2**30  # bytes of ids; more take a second or longer to read
DOCUMENT = b"\0"  # precedes each document in the hash of a side


@dataclass(frozen=True)
class TokenData(RunData):
    """Training tokens and held-out tokens of one text under one tokenizer."""

    train: Tokens
    val: Tokens  # the first token is only context
    tokenizer: Tokenizer
    text_hash: str
    val_bytes: int | None  # UTF-8 bytes of the scored tokens
    reading: Mapping[str, Any] = field(default_factory=dict)  # facts for the run's record
    train_documents: DocumentNumbers | None = None  # of `train`; given if documents are kept apart
    val_documents: DocumentNumbers | None = None  # of `val`

    def training_batch(
        self,
        seed: int,
        step: int,
        batch_size: int,
        context_length: int,
        rows: Rows | None = None,
    ) -> Batch:
        sizes = batch_size, context_length
        return training_batch(self.train, seed, step, *sizes, self.train_documents, rows)

    def validation(self, batch_size: int, context_length: int) -> ValidationSet:
        return ValidationSet(self.val, batch_size, context_length, self.val_documents)

    def opening_rows(self, context_length: int, tokens: int) -> Tensor:
        return opening_rows(self.val, context_length, tokens)

    def opening_documents(self, rows: Tensor) -> Tensor | None:
        if self.val_documents is None:
            return None
        return torch.from_numpy(self.val_documents(0, rows.numel())).view_as(rows)

    @property
    def val_tokens(self) -> int:
        return len(self.val)

    def facts(self) -> dict[str, Any]:
        counts = {"train_tokens": len(self.train), "val_tokens": len(self.val) - 1}
        if self.val_bytes is not None:
            counts["val_bytes"] = self.val_bytes
        return {**counts, **self.reading}


class TextSource(Source):
    """A text: documents to train on, and documents to hold out."""

    name = "the text"  # in messages
    leads = False  # a separator stands before the first document too
    separated = True  # separators stand between documents

    @abstractmethod
    def stamp(self) -> str:
        """Return a string that changes with the text, without reading all of it."""

    @abstractmethod
    def documents(self, val_fraction: float) -> Iterator[tuple[str, Iterable[str]]]:
        """Yield (side, text in pieces) of each document; the sides are "train" and "val".

        Raises DataError, naming file and place, if it is not text.
        """

    @abstractmethod
    def facts(self, documents: int) -> dict[str, Any]:
        """Return facts for the run's record, once all `documents` have been read."""

    def size(self) -> int:
        """Return the bytes of the text, for the progress bar; 0: unknown."""
        return 0

    def text_sha256(self) -> str | None:
        """Return the text's hash once it has been read; None: hash the documents in order."""
        return None

    def load(self, request: Request) -> TokenData:
        text, recipe = _text_key(self, request), request.tokenizer.fingerprint()
        try:
            for folder in request.cache.glob(f"{text[:32]}-*"):
                with contextlib.suppress(DataError):  # it is made again
                    index = read_index(folder, request.cache)
                    if recipe in (index.recipe, index.tokenizer):
                        break
            else:
                name = f"{text[:32]}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
                folder = request.cache / name
                index = make_tokens(self, folder, request)
        except (OSError, DiskError) as error:
            reason = error.message if isinstance(error, DiskError) else error.strerror
            raise DiskError(
                "cache_dir",
                f"{request.cache} cannot be used ({reason}); give another cache_dir",
            ) from None
        return read_tokens(folder, index, request)

    def prepare(self, folder: Path, request: Request) -> Index:
        """Write the token file to `folder`, if missing.

        Raises ConfigError if the folder holds something else.
        """
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        ours = {TOKENS, INDEX, STARTS, LOCK, IN_RUN}
        others = [name for name in names if name not in ours and not name.endswith(".part")]
        if others:
            has = f"holds other files ({', '.join(others[:3])})"
            raise ConfigError("to", f"{folder} {has}; give another folder, or remove it")
        return make_tokens(self, folder, request)


def make_tokens(source: TextSource, folder: Path, request: Request) -> Index:
    """Write the token file of a text to `folder`, if missing; return its index.

    Waits for another process that makes it. Raises DataError if it is not text or changes
    meanwhile, ConfigError if the folder has other ids, DiskError if the disk refuses.
    """
    tokenizer, fraction = request.tokenizer, request.val_fraction
    recipe, text, stamp = tokenizer.fingerprint(), _text_key(source, request), source.stamp()
    with lock_folder(folder):
        if (folder / INDEX).is_file():
            try:
                index = read_index(folder, request.cache)
            except DataError as error:
                print(f"data: {error.message.partition(';')[0]}; encoding again", file=sys.stderr)
            else:
                if index.text != text or recipe not in (index.recipe, index.tokenizer):
                    has = "has the ids of another text, or of another tokenizer"
                    raise ConfigError("to", f"{folder} {has}; give another folder, or remove it")
                return index
        tokenizer.fit(lambda side: _read(source, fraction, side))
        with (
            replacing(folder / TOKENS) as file,
            tempfile.TemporaryFile(dir=folder) as held_out,
            show_progress(f"data: encoding {source.name}", source.size()) as advance,
        ):
            separator = tokenizer.separator()[1] if source.separated else np.empty(0, np.uint16)
            train = _Writer(file, separator, source.leads)
            val = _Writer(held_out, separator, True)
            sides = {"train": train, "val": val}
            for side, begins, piece, ids in _encode(tokenizer, source.documents(fraction)):
                sides[side].add(begins, piece, ids)
                advance(len(piece))
            if not (train.tokens and val.tokens):
                raise DataError(
                    "data",
                    f"{source.name} is too short to train on one part of it and hold out another; "
                    "give more of it, or say what is held out",
                )
            held_out.seek(0)
            while raw := held_out.read(2**20):
                file.write(raw)
        if source.stamp() != stamp:
            raise DataError("data", f"{source.name} changed while it was read; start again")
        ids = map_ids(folder / TOKENS)
        highest, digest = content_of(ids, folder / TOKENS, request.cache)
        starts = np.concatenate([np.asarray(train.starts), np.asarray(val.starts) + train.tokens])
        write_atomically(folder / STARTS, lambda file: np.save(file, starts))
        write_tokenizer(folder / IN_RUN, tokenizer.files())
        # One token of context: the last of a separator, or of a single text's training part.
        val_start = train.tokens + len(separator) - 1
        sides = [[side, writer.text.hexdigest()] for side, writer in sides.items()]
        index = Index(
            text,
            recipe,
            tokenizer.fingerprint(),
            request.tokenizer_name,
            tokenizer.settings(),
            source.text_sha256() or hashlib.sha256(json.dumps(sides).encode()).hexdigest(),
            digest,
            highest,
            train.facts(),
            val.facts(),
            val_start,
            count_bytes(ids[val_start + 1 :], tokenizer, separator),
            {
                **source.facts(train.documents + val.documents),
                "separator": tokenizer.separator()[0] if source.separated else None,
            },
        )
        raw = json.dumps(asdict(index), indent=1, ensure_ascii=False).encode()
        write_atomically(folder / INDEX, lambda file: file.write(raw))
    return index


class _Writer:
    """Writes the ids of one side to a file, with a separator between documents."""

    def __init__(self, file: IO[bytes], separator: Ids, leads: bool) -> None:
        self.file, self.separator, self.leads = file, separator.astype(TOKEN_DTYPE), leads
        self.text = hashlib.sha256()
        self.tokens = self.documents = self.bytes = 0
        self.starts = array("q")

    def add(self, begins: bool, piece: str, ids: Ids) -> None:
        """Add a piece of a document, perhaps its first."""
        if begins:
            if len(self.separator) and (self.documents or self.leads):
                self.starts.append(self.tokens)
                self._write(self.separator)
            self.documents += 1
            self.text.update(DOCUMENT)
        raw = utf8(piece, "data")
        self.text.update(raw)
        self.bytes += len(raw)
        self._write(ids)

    def _write(self, ids: Ids) -> None:
        self.file.write(ids.astype(TOKEN_DTYPE, copy=False).data)
        self.tokens += len(ids)

    def facts(self) -> Side:
        return Side(self.tokens, self.documents, self.bytes)


Piece = tuple[str, bool, str]  # side, whether a document begins, text


def _encode(
    tokenizer: Tokenizer, documents: Iterable[tuple[str, Iterable[str]]]
) -> Iterator[tuple[str, bool, str, Ids]]:
    """Yield the pieces of all documents with their ids, while the next batch is encoded."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque()
        for batch in _batches(_pieces(tokenizer, documents)):
            texts = [piece for _, _, piece in batch]
            waiting.append((batch, pool.submit(tokenizer.encode_batch, texts)))
            while len(waiting) > 2 or (waiting and not batch):
                done, encoded = waiting.popleft()
                for piece, ids in zip(done, encoded.result(), strict=True):
                    yield *piece, ids


def _pieces(
    tokenizer: Tokenizer, documents: Iterable[tuple[str, Iterable[str]]]
) -> Iterator[Piece]:
    for side, text in documents:
        begins = True
        for piece in tokenizer.cut(text):
            if piece:  # empty documents are left out
                yield side, begins, piece
                begins = False


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces with BATCH_CHARS characters in all, then an empty list."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[2])
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
    yield []


def _read(source: TextSource, fraction: float, side: str | None) -> Iterator[Iterable[str]]:
    """Yield the documents of one side or both, as a tokenizer reads them for its vocabulary."""
    if side is None and source.separated:
        yield [SEPARATOR]
    with show_progress(f"data: reading {source.name}", source.size()) as advance:
        for found, document in source.documents(fraction):
            if side in (None, found):
                yield with_progress(document, advance)


def read_index(folder: Path, cache: Path) -> Index:
    """Return the index in a folder. Raises DataError if it or its token file is damaged."""
    path = folder / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "data.path",
            f"{path} cannot be used ({error}); remove {folder} and prepare it again",
        ) from None
    path, how = folder / TOKENS, None
    if not (path.is_file() and (folder / STARTS).is_file()):
        how = "is missing"
    elif path.stat().st_size != TOKEN_DTYPE.itemsize * (index.train.tokens + index.val.tokens):
        how = "is cut short"
    elif content_of(map_ids(path), path, cache)[1] != index.sha256:
        how = "is damaged"
    if how:
        raise DataError("data.path", f"{path} {how}; remove {folder} and prepare it again")
    return index


def read_tokens(folder: Path, index: Index, request: Request) -> TokenData:
    """Return the ids in a folder as the data of a run; its tokenizer takes its vocabulary.

    Raises ConfigError for too few ids, or if there are no documents to keep apart.
    """
    request.tokenizer.restore(index.settings, folder)
    ids, count = map_ids(folder / TOKENS), index.train.tokens
    train, val = ids[:count], ids[index.val_start :]
    check_lengths(train, val, request)
    documents: list[DocumentNumbers | None] = [None, None]
    if request.mask_documents:
        if max(index.train.documents, index.val.documents) < 2:
            raise ConfigError(
                "data.mask_documents",
                "the text lacks two documents to keep apart; leave it out, or give a folder of "
                "several files",
            )
        starts = np.load(folder / STARTS, mmap_mode="r")
        documents = [DocumentsFrom(starts, place) for place in (0, index.val_start)]
    return TokenData(
        train, val, request.tokenizer, index.text_sha256, index.val_bytes, index.facts, *documents
    )


def check_lengths(train: Tokens, val: Tokens, request: Request) -> None:
    """Raise ConfigError if no window fits the training tokens, or no token can be scored."""
    if len(train) < request.context_length + 1:
        raise ConfigError(
            "model.context_length",
            f"{request.context_length} is too long for this text: {len(train):,} of its tokens are "
            f"for training; give at most {max(len(train) - 1, 0):,}, or a longer text",
        )
    if len(val) < 2:
        raise ConfigError(
            "data.val_path", f"has {len(val)} ids, and 2 are needed to score one; give more text"
        )


@dataclass(frozen=True)
class DocumentsFrom:
    """Numbers the documents of the ids from `offset` on; `starts`: their starts in the file."""

    starts: NDArray[np.int64]
    offset: int

    def __call__(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document number of each token `start` .. `stop` - 1; the first has 0."""
        start, stop = self.offset + start, self.offset + stop
        first, last = np.searchsorted(self.starts, (start + 1, stop))
        numbers = np.zeros(stop - start, dtype=np.int64)
        numbers[self.starts[first:last] - start] = 1
        return numbers.cumsum()


def map_ids(path: Path, offset: int = 0) -> Ids:
    """Return the ids in a file from byte `offset` on, mapped to memory."""
    return np.memmap(path, TOKEN_DTYPE, "r", offset).view(np.ndarray)


def in_pieces(ids: Tokens) -> Iterator[Ids]:
    """Yield all ids, at most PIECE_TOKENS of them at a time."""
    for start in range(0, len(ids), PIECE_TOKENS):
        yield ids[start : start + PIECE_TOKENS]


def _measure(ids: Tokens) -> tuple[int, str]:
    """Return the highest id, and the SHA-256 of all."""
    highest, digest = 0, hashlib.sha256()
    for piece in in_pieces(ids):
        digest.update(piece.data)
        highest = max(highest, int(piece.max()))
    return highest, digest.hexdigest()


def content_of(ids: Tokens, path: Path, cache: Path) -> tuple[int, str]:
    """Return the highest of a file's ids, and the SHA-256 of all.

    The file is read once: the cache keeps the answer by path, size and modification time.
    """
    status = path.stat()
    made_of = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    record = cache / f"{hashlib.sha256(made_of.encode()).hexdigest()}.ids.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or damaged: read anew
        return msgspec.json.decode(record.read_bytes(), type=tuple[int, str])
    if 2 * len(ids) >= LARGE:
        print(f"data: checking {2 * len(ids) / 1e9:.1f} GB of ids, once", file=sys.stderr)
    content = _measure(ids)
    with contextlib.suppress(DiskError):  # read it again next time
        write_atomically(record, lambda file: file.write(json.dumps(content).encode()))
    return content


def count_bytes(ids: Tokens, tokenizer: Tokenizer, separator: Ids) -> int:
    """Return the number of UTF-8 bytes of these ids.

    A separator counts as len(SEPARATOR) bytes, whatever its ids.
    """
    lengths = tokenizer.byte_lengths()
    if len(separator) == 1:  # an id of its own, which no text has; else it is as long as SEPARATOR
        lengths[separator] = len(SEPARATOR)
    return sum(int(lengths[piece].sum()) for piece in in_pieces(ids))


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; wait while another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=QUIET_SECONDS)
    except Timeout:
        print(f"data: waiting for another process that prepares {folder}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _text_key(source: TextSource, request: Request) -> str:
    """Return a hash of everything but the vocabulary that decides a text's ids."""
    code = [class_code(type(one)) for one in (source, request.tokenizer)]
    made_of = [source.stamp(), request.val_fraction, *code]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
