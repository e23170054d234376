"""Turns a text of any size into shards of token ids, in several processes, a part at a time.

Each part of the text has shards of its own and a record that says they are whole, so a killed
preparation goes on with the parts that are missing.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptattn.data.corpus import Corpus
from gptattn.data.document_starts import STARTS_DTYPE
from gptattn.data.prepared import (
    INDEX,
    PLAN,
    Index,
    ShardRecord,
    documents_file,
    read_index,
    write_index,
)
from gptattn.data.segments import Segment, grouped, text_segments
from gptattn.data.shards import header
from gptattn.data.text_file import TextFile
from gptattn.data.token_files import TOKEN_DTYPE
from gptattn.data.tokenizer import SEPARATOR, Tokenizer, utf8
from gptattn.data.tokenizer_files import IN_RUN, write
from gptattn.errors import ConfigError, DataError, OutOfMemory
from gptattn.machine.disk import replacing, write_atomically
from gptattn.machine.lock import hold_lock
from gptattn.machine.read_progress import show_progress, with_progress
from gptattn.machine.source_code import class_code

PART_BYTES = 2**25  # of text, in a part
DONE = "part_{:06d}.json"
LOCK = ".lock"
TICK_SECONDS = 1.0
DOCUMENT = b"\0"  # stands before each document in the text's hash


@dataclass(frozen=True)
class PartedText:
    """A text that is read in parts. `val_fraction`: of the documents whose segment has no side."""

    parts: Sequence[tuple[Segment, ...]]
    val_fraction: float
    name: str  # for messages

    @cached_property
    def size(self) -> int:
        """Its size in bytes, or an estimate."""
        return sum(segment.size for part in self.parts for segment in part)

    @cached_property
    def keys(self) -> str:
        """A hash of all that decided what the text is, and what of it is held out."""
        return self.keys_now()

    def keys_now(self) -> str:
        """Return `keys` anew: another one if a file has changed."""
        keys = [[segment.key() for segment in part] for part in self.parts]
        return hashlib.sha256(json.dumps([keys, self.val_fraction]).encode()).hexdigest()

    def pieces(self, side: str | None = None) -> Iterator[str]:
        """Yield the text in pieces, or that of one side, without separators."""
        return chain.from_iterable(self.runs(side))

    def runs(self, side: str | None = None) -> Iterator[Iterator[str]]:
        """Yield documents, or parts of them that begin and end between words, each in pieces."""
        for part in self.parts:
            for found, _, pieces in _runs(part, self.val_fraction):
                if side in (None, found):
                    yield pieces

    def plan(self, tokenizer: Tokenizer) -> str:
        """Return a hash of all that decides what is in the shards."""
        made_of = [self.keys, tokenizer.fingerprint(), class_code(type(tokenizer))]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def in_parts(corpus: Corpus, val_fraction: float, name: str) -> PartedText | None:
    """Return a text in files as parts, its held-out files or the end of each file held out.

    None: it is not in files.
    """
    files = [*corpus.documents, *corpus.held_out]
    if not all(isinstance(file, TextFile) for file in files):
        return None
    fraction = 0.0 if corpus.held_out else val_fraction
    segments: list[Segment] = []
    for sources, side in ((corpus.documents, "train"), (corpus.held_out, "val")):
        for file in sources:
            assert isinstance(file, TextFile)
            segments += text_segments(file, PART_BYTES, fraction, side)
    return PartedText(grouped(segments, PART_BYTES), val_fraction, name)


def fit(tokenizer: Tokenizer, text: PartedText, cache: Path) -> None:
    """Build the tokenizer's vocabulary from the text, unless it has one already.

    `cache` keeps what it has learned.
    """
    with show_progress(f"reading {text.name}", text.size) as advance:
        tokenizer.fit(chain([SEPARATOR], with_progress(text.pieces(), advance)))
    tokenizer.learn(text.runs("train"), text.size, f"{text.keys} train", cache)


def prepare(
    text: PartedText,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    choice: str,
    workers: int,
    what: str = "encoding",
) -> Index:
    """Write the shards that `folder` lacks and its index; return the index.

    `choice`: the tokenizer's name in conf/tokenizer, for messages; `what` is said to be done.
    Raises ConfigError if the folder holds something else, DataError for what is no text,
    RunFolderError while another process prepares the same.
    """
    plan = text.plan(tokenizer)
    if (folder / INDEX).is_file() and (index := read_index(folder)).plan == plan:
        index.paths(folder)  # a shard that was lost since is an error
        return index
    with _alone(folder):
        _begin(folder, plan)
        records = _encoded(text, tokenizer, folder, workers, what)
        if text.keys_now() != text.keys:
            raise DataError(
                "data",
                f"{text.name} changed while it was being encoded; remove {folder} and start again",
            )
        if {record.side for record in records} != {"train", "val"}:
            raise DataError(
                "data",
                f"{text.name} has no text for both training and validation; give more of it, or "
                "say what is held out",
            )
        hashes = [[record.side, record.text_sha256] for record in records]
        digest = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
        write(folder / IN_RUN, tokenizer.files())
        characters = tokenizer.settings().get("characters", "")
        index = Index(digest, tokenizer.fingerprint(), choice, characters, plan, records)
        write_index(folder, index)
        for file in [folder / PLAN, *folder.glob(DONE.replace("{:06d}", "*"))]:
            file.unlink()
    return index


def discard(folder: Path, damaged: Callable[[], bool]) -> None:
    """Remove what has been prepared, unless another process has mended it meanwhile.

    Raises RunFolderError while another process prepares there.
    """
    with _alone(folder):
        if damaged():
            for file in folder.iterdir():
                if file.name != LOCK:
                    shutil.rmtree(file) if file.is_dir() else file.unlink()


def _alone(folder: Path) -> contextlib.AbstractContextManager[object]:
    why = f"another process is preparing {folder}; wait for it, or stop it"
    return hold_lock(folder / LOCK, "to", why)


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder has files, and no preparation has begun in it."""
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if {PLAN, INDEX}.isdisjoint(names) and (others := [n for n in names if n != LOCK]):
        what = f"files of its own ({', '.join(others[:3])})"
        raise ConfigError("to", f"{folder} has {what}; give another folder, or remove it")


def _begin(folder: Path, plan: str) -> None:
    """Make the folder this plan's. Raises ConfigError if it has other files."""
    begun = folder / PLAN
    if begun.is_file() and begun.read_bytes() == plan.encode():
        return
    check_folder(folder)
    if begun.exists() or (folder / INDEX).exists():
        what = "the shards of another text, or of another tokenizer"
        raise ConfigError("to", f"{folder} has {what}; give another folder, or remove it")
    write_atomically(begun, lambda file: file.write(plan.encode()))


def _encoded(
    text: PartedText,
    tokenizer: Tokenizer,
    folder: Path,
    workers: int,
    what: str,
) -> list[ShardRecord]:
    """Encode what is missing; return the records of all shards, in the order of the text."""
    done = {number: _done(folder, number) for number in range(len(text.parts))}
    found = {number: records for number, records in done.items() if records is not None}
    missing = {n: sum(segment.size for segment in text.parts[n]) for n in done if n not in found}
    if found and missing:
        there = f"{len(found)} of {len(text.parts)} parts are there"
        print(f"{what}: {there}", file=sys.stderr, flush=True)
    job = _Job(tokenizer, folder, text.val_fraction)
    with show_progress(what, sum(missing.values())) as advance:
        workers = min(workers, len(missing))
        for number, records in _each(job, text.parts, [*missing], workers, lambda: advance(0)):
            found[number] = records
            advance(missing[number])
    return list(chain.from_iterable(found[number] for number in range(len(text.parts))))


def _done(folder: Path, number: int) -> list[ShardRecord] | None:
    """Return the records of a part that is whole; None if it is to be made."""
    try:
        nodes = json.loads((folder / DONE.format(number)).read_bytes())
        records = [ShardRecord(**node) for node in nodes]
    except (OSError, ValueError, TypeError):
        return None
    return records if all((folder / record.file).is_file() for record in records) else None


@dataclass(frozen=True)
class _Job:
    """What each process needs to encode parts."""

    tokenizer: Tokenizer
    folder: Path
    val_fraction: float

    def encode(self, number: int, part: Sequence[Segment]) -> list[ShardRecord]:
        """Write the shards of a part, and then the record that they are whole."""
        with contextlib.ExitStack() as files:
            sides: dict[str, _Writer] = {}
            for side, begins, pieces in _runs(part, self.val_fraction):
                if side not in sides:
                    path = self.folder / f"{side}_{number:06d}.bin"
                    sides[side] = _Writer(files, path, self.tokenizer)
                sides[side].add(begins, pieces)
            records = [writer.finish(side) for side, writer in sorted(sides.items())]
        text = json.dumps([asdict(record) for record in records])
        write_atomically(self.folder / DONE.format(number), lambda file: file.write(text.encode()))
        return records


def _runs(
    part: Sequence[Segment], val_fraction: float
) -> Iterator[tuple[str, bool, Iterator[str]]]:
    """Yield (side, whether a document begins, its pieces); empty documents are left out."""
    for segment in part:
        begins = False
        filled = (piece for piece in segment() if piece != "")
        for is_mark, pieces in groupby(filled, key=lambda piece: piece is None):
            if is_mark:
                begins = True
                continue
            if segment.side is not None:
                yield segment.side, begins, pieces  # type: ignore[misc]
            else:
                whole = "".join(pieces)  # type: ignore[arg-type]
                yield _side_of(whole, val_fraction), begins, iter([whole])
            begins = False


def _side_of(document: str, val_fraction: float) -> str:
    """Return the side of a document, by its hash: the same wherever it stands."""
    digest = hashlib.sha256(utf8(document, "data")).hexdigest()
    return "val" if int(digest[:8], 16) < val_fraction * 2**32 else "train"


class _Writer:
    """Writes one shard, and where documents begin in it."""

    def __init__(self, files: contextlib.ExitStack, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self.tokenizer = path, tokenizer
        self._separator = tokenizer.separator()[1]
        self._file = files.enter_context(replacing(path))
        self._file.write(header(0))
        self._ids, self._text = hashlib.sha256(), hashlib.sha256()
        self._count, self._bytes, self._highest = 0, 0, 0
        self._starts: list[int] = []

    def add(self, begins: bool, pieces: Iterator[str]) -> None:
        """Add the text of a document, after a separator if it begins here."""
        if begins:
            self._starts.append(self._count)
            self._text.update(DOCUMENT)
            self._write(self._separator)
        for ids in self.tokenizer.encode_pieces(map(self._hashed, pieces), "data"):
            self._write(ids)

    def _hashed(self, piece: str) -> str:
        raw = utf8(piece, "data")
        self._text.update(raw)
        self._bytes += len(raw)
        return piece

    def _write(self, ids: NDArray[np.uint16]) -> None:
        if len(ids):
            raw = ids.astype(TOKEN_DTYPE, copy=False).data
            self._file.write(raw)
            self._ids.update(raw)
            self._count += len(ids)
            self._highest = max(self._highest, int(ids.max()))

    def finish(self, side: str) -> ShardRecord:
        """Write the header and the starts; return the shard's record."""
        self._file.seek(0)
        self._file.write(header(self._count))
        starts = np.array(self._starts, dtype=STARTS_DTYPE).tobytes()
        starts_sha256 = hashlib.sha256(starts).hexdigest()
        write_atomically(documents_file(self.path), lambda file: file.write(starts))
        return ShardRecord(
            self.path.name,
            side,
            self._count,
            self._highest,
            self._ids.hexdigest(),
            self._text.hexdigest(),
            self._bytes,
            len(self._starts),
            starts_sha256,
        )


def _each(
    job: _Job,
    parts: Sequence[tuple[Segment, ...]],
    numbers: Sequence[int],
    workers: int,
    tick: Callable[[], object],
) -> Iterator[tuple[int, list[ShardRecord]]]:
    """Encode these parts, as many at a time as there are workers; yield each when it is done.

    `tick` is called now and then.
    """
    if workers < 2:
        yield from ((number, job.encode(number, parts[number])) for number in numbers)
        return
    # Spawned, since a forked process may inherit a lock that another thread holds.
    context = multiprocessing.get_context("spawn")
    # All workers see its end, when we close it and when we are killed. An Event would wait for a
    # worker that was killed.
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (job, theirs))
    with theirs, ours, pool:
        waiting = iter(numbers)
        running: dict[Future[list[ShardRecord]], int] = {}
        try:
            while True:
                for number in islice(waiting, 2 * workers - len(running)):  # the next at hand
                    running[pool.submit(_encode, number, parts[number])] = number
                if not running:
                    return
                done, _ = wait(running, TICK_SECONDS, FIRST_COMPLETED)
                tick()
                for future in done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool:
            raise OutOfMemory(
                "data",
                "a process that encodes was killed, perhaps for lack of memory; the same command "
                "goes on where it stopped, and scripts/prepare.py with workers=1 needs the least",
            ) from None
        finally:
            if running:
                ours.close()


_JOB: list[_Job] = []  # of a worker process


def _begin_worker(job: _Job, parent: Connection) -> None:
    # The library's own threads would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which stops us
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _JOB.append(job)


def _end_with(parent: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        parent.recv_bytes()  # nothing ever comes
    os._exit(1)


def _encode(number: int, part: Sequence[Segment]) -> list[ShardRecord]:
    return _JOB[0].encode(number, part)
