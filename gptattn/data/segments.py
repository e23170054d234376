"""Pieces of large texts that can be read one without the other: ranges of files, and of rows.

Processes read them at the same time, so they can be pickled, and need no torch.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from gptattn.data.text_file import TextFile
from gptattn.errors import DataError
from gptattn.machine.disk import REFUSALS

READ_BYTES = 2**20
LINE_BYTES = 2**28  # of a row, which is held whole
# A cut before one of these, after what is no space, changes no word of GPT-2's pattern.
BREAK = re.compile(rb"[ \n\r]")
CHARACTER_BYTES = 4  # at most, in UTF-8
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]\w\w")  # half a character, unless it is one of two

Stream = Iterator[str | None]  # pieces of text; None stands before each document


class Segment(Protocol):
    """A range of a text."""

    @property
    def side(self) -> str | None:
        """`train` or `val`; None: the hash of each document decides."""
        ...

    @property
    def size(self) -> int:
        """Its size in bytes, or an estimate."""
        ...

    def __call__(self) -> Stream:
        """Yield a None before each document that begins here, and the text in pieces.

        Raises DataError, naming file and place, for what is no text.
        """
        ...

    def key(self) -> str:
        """Return a string that differs between segments with different content."""
        ...


@dataclass(frozen=True)
class TextSegment:
    """The bytes `start` .. `stop` - 1 of a text file. A document begins if `begins`."""

    file: TextFile
    start: int
    stop: int
    side: str | None
    begins: bool

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __call__(self) -> Stream:
        if self.begins:
            yield None
        yield from self.file.part(self.start, self.stop)

    def key(self) -> str:
        return f"{_stamp(self.file.path)} {self.start} {self.stop} {self.begins} {self.side}"


@dataclass(frozen=True)
class JsonLines:
    """The lines of a JSON Lines file that begin at the bytes `start` .. `stop` - 1: documents."""

    path: Path
    start: int
    stop: int
    side: str | None
    text_field: str

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __call__(self) -> Stream:
        with self.path.open("rb") as file:
            place = _line_start(file, self.start)
            while place < self.stop and (line := file.readline(LINE_BYTES)):
                if line.strip():
                    yield None
                    yield self._text(line, place)
                place += len(line)

    def _text(self, line: bytes, place: int) -> str:
        where = f"{self.path}, the line at byte {place:,}"
        try:
            row = msgspec.json.decode(line if place else line.removeprefix(codecs.BOM_UTF8))
        except (ValueError, RecursionError) as error:  # nested too deeply
            why = f"longer than {LINE_BYTES:,} bytes" if len(line) == LINE_BYTES else error
            if SURROGATE.search(line) and _is_lenient_json(line):
                why = "it has half a character, from \\ud800 to \\udfff"
            raise DataError(
                "data", f"{where}, is no JSON ({why}); give one object in each line"
            ) from None
        try:
            return text_of(row, self.text_field)
        except ValueError as error:
            raise DataError("data.text_field", f"{where}: {error}") from None

    def key(self) -> str:
        return f"{_stamp(self.path)} {self.start} {self.stop} {self.text_field} {self.side}"


@dataclass(frozen=True)
class ParquetRows:
    """A row group of a Parquet file, each row a document."""

    path: Path
    group: int
    side: str | None
    text_field: str
    size: int

    def __call__(self) -> Stream:
        import pyarrow.parquet

        # With a buffer, a group's column is read piece by piece.
        with intact(self.path), pyarrow.parquet.ParquetFile(self.path, buffer_size=READ_BYTES) as f:
            for batch in f.iter_batches(1024, [self.group], columns=[self.text_field]):
                yield from documents_of(batch.column(0), self.path, self.text_field)

    def key(self) -> str:
        return f"{_stamp(self.path)} {self.group} {self.text_field} {self.side}"


@dataclass(frozen=True)
class ArrowRows:
    """The batches `start` .. `stop` - 1 of an Arrow file or stream, each row a document."""

    path: Path
    start: int
    stop: int
    side: str | None
    text_field: str
    size: int

    def __call__(self) -> Stream:
        with arrow_columns(self.path, self.text_field) as columns:
            for column in islice(columns, self.start, self.stop):
                yield from documents_of(column, self.path, self.text_field)

    def key(self) -> str:
        return f"{_stamp(self.path)} {self.start} {self.stop} {self.text_field} {self.side}"


@dataclass(frozen=True)
class HubRows:
    """Rows of a data set of the library `datasets`, which reads them from disk or network."""

    rows: Any  # a Dataset or an IterableDataset
    name: str
    which: str  # all that decides which rows they are
    side: str | None
    text_field: str
    size: int

    def __call__(self) -> Stream:
        rows = iter(self.rows)
        while (row := self._next(rows)) is not None:
            yield None
            try:
                yield text_of(row, self.text_field)
            except ValueError as error:
                raise DataError("data.text_field", f"{self.name}: {error}") from None

    def _next(self, rows: Iterator[Any]) -> Any:
        try:
            return next(rows, None)
        except MemoryError:
            raise
        # The library raises its own errors and those of its transport libraries.
        except Exception as error:
            raise unreadable("data.name", self.name, error) from None

    def key(self) -> str:
        return f"{self.which} {self.text_field} {self.side}"


def _is_lenient_json(line: bytes) -> bool:
    """Whether Python's reader takes the line, which accepts halves of characters."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def text_of(row: Any, text_field: str) -> str:
    """Return the text of a row. Raises ValueError if it has none."""
    if not isinstance(row, dict):
        raise ValueError("it is no object with fields")
    if text_field not in row:
        raise ValueError(f"it has no field {text_field!r}, only {', '.join(sorted(row))[:200]}")
    if not isinstance(row[text_field], str):
        raise ValueError(f"its field {text_field!r} is no text")
    return row[text_field]


@contextlib.contextmanager
def intact(path: Path) -> Iterator[None]:
    """Raise DataError for what the library says of a damaged file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unreadable("data", str(path), error) from None


def unreadable(field: str, name: str, error: Exception) -> Exception:
    """Return the DataError for what a library raised; what the disk refuses stays as it is."""
    if isinstance(error, OSError) and error.errno in REFUSALS:
        return error
    first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return DataError(field, f"{name} cannot be read ({first}); it may be damaged")


@contextlib.contextmanager
def arrow_columns(path: Path, text_field: str) -> Iterator[Iterator[Any]]:
    """Yield the column of each batch of an Arrow file or stream.

    Raises DataError if it is damaged, or without such a field.
    """
    import pyarrow

    with intact(path), pyarrow.memory_map(str(path)) as source:
        try:
            batches: Any = pyarrow.ipc.open_stream(source)
            schema = batches.schema
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            schema = file.schema
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        _check_field(path, text_field, schema.names)
        yield (batch.column(text_field) for batch in batches)


def documents_of(column: Any, path: Path, text_field: str) -> Stream:
    """Yield the documents of an Arrow column."""
    column.validate(full=True)  # places beyond the file would end the process
    for value in column.to_pylist():
        if not isinstance(value, str):
            raise DataError("data.text_field", f"{path}: a row's {text_field!r} is no text")
        yield None
        yield value


def text_segments(file: TextFile, length: int, fraction: float, side: str) -> list[Segment]:
    """Cut a text file into segments of about `length` bytes, all of this side but the held-out end.

    That has `fraction` of the bytes. Joined, the ids of segments are those of the whole, for every
    tokenizer.
    """
    size = file.path.stat().st_size
    with file.path.open("rb") as raw:
        tail = _safe_cut(raw, round(size * (1 - fraction)))
        cuts, at = {0, tail}, length
        while at < size:
            cuts.add(cut := _safe_cut(raw, at))
            at = length * (cut // length + 1)
    places = sorted(cuts)
    ends = [*places[1:], size]
    return [
        TextSegment(file, start, stop, "val" if start >= tail else side, start in (0, tail))
        for start, stop in zip(places, ends, strict=True)
        if start < stop
    ]


def _safe_cut(file: BinaryIO, at: int) -> int:
    """Return the first place from `at` on where a cut changes no word; the end if there is none."""
    place = file.seek(max(at - CHARACTER_BYTES, 0))
    held = b""
    while chunk := file.read(READ_BYTES):
        held += chunk
        for found in BREAK.finditer(held, max(at - place, 0)):
            before = held[max(found.start() - CHARACTER_BYTES, 0) : found.start()]
            if before.decode(errors="ignore")[-1:].strip():
                return place + found.start()
        place += max(len(held) - CHARACTER_BYTES, 0)
        held = held[-CHARACTER_BYTES:]
    return place + len(held)


def json_segments(path: Path, length: int, side: str | None, text_field: str) -> list[Segment]:
    """Cut a JSON Lines file into segments of about `length` bytes."""
    size = path.stat().st_size
    starts = range(0, size, length)
    return [JsonLines(path, start, min(start + length, size), side, text_field) for start in starts]


def parquet_segments(path: Path, side: str | None, text_field: str) -> list[Segment]:
    """Return the row groups of a Parquet file.

    Raises DataError if it is damaged, or without such a field.
    """
    import pyarrow.parquet

    with intact(path), pyarrow.parquet.ParquetFile(path) as file:
        meta = file.metadata
    names = [meta.schema.column(i).path for i in range(meta.num_columns)]
    _check_field(path, text_field, names)
    column = names.index(text_field)
    groups = [meta.row_group(i).column(column) for i in range(meta.num_row_groups)]
    return [
        ParquetRows(path, i, side, text_field, group.total_uncompressed_size)
        for i, group in enumerate(groups)
    ]


def arrow_segments(path: Path, length: int, side: str | None, text_field: str) -> list[Segment]:
    """Cut an Arrow file into segments of about `length` bytes. Raises as `arrow_columns` does."""
    segments: list[Segment] = []
    start = size = stop = 0
    with arrow_columns(path, text_field) as columns:
        for stop, column in enumerate(columns, start=1):
            size += column.nbytes
            if size >= length:
                segments.append(ArrowRows(path, start, stop, side, text_field, size))
                start, size = stop, 0
    if start < stop:
        segments.append(ArrowRows(path, start, stop, side, text_field, size))
    return segments


def _check_field(path: Path, text_field: str, names: Sequence[str]) -> None:
    if text_field not in names:
        raise DataError(
            "data.text_field", f"{path} has no field {text_field!r}, only {', '.join(names)}"
        )


def grouped(segments: Sequence[Segment], length: int) -> list[tuple[Segment, ...]]:
    """Put neighbours together to parts of about `length` bytes, in order."""
    parts: list[tuple[Segment, ...]] = []
    held: list[Segment] = []
    size = 0
    for segment in segments:
        if held and size + segment.size > length:
            parts.append(tuple(held))
            held, size = [], 0
        held.append(segment)
        size += segment.size
    return [*parts, tuple(held)] if held else parts


def _line_start(file: BinaryIO, at: int) -> int:
    """Move to the first line that begins at `at` or later; return its place."""
    if at:
        file.seek(at - 1)
        while (line := file.readline(READ_BYTES)) and not line.endswith(b"\n"):
            pass
    return file.tell()


def _stamp(path: Path) -> str:
    """Return what tells whether a file has changed."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
