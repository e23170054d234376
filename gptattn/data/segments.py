"""Pieces of large texts that can be read one without the other: ranges of files, and of rows.

Processes read them at the same time, so they can be pickled, and need no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from gptattn.data.text_file import TextFile
from gptattn.errors import DataError

READ_BYTES = 2**20
# A cut before one of these, after a visible ASCII character, changes no word of GPT-2's pattern.
BREAKS = b" \n"
VISIBLE = range(0x21, 0x7F)

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
            while place < self.stop and (line := file.readline()):
                if line.strip():
                    yield None
                    yield self._text(line, place)
                place += len(line)

    def _text(self, line: bytes, place: int) -> str:
        try:
            return text_of(msgspec.json.decode(line), self.text_field)
        except (ValueError, msgspec.DecodeError) as error:
            raise DataError(
                "data.text_field", f"{self.path}, the line at byte {place:,}: {error}"
            ) from None

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

        with pyarrow.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(1024, [self.group], columns=[self.text_field]):
                yield from documents_of(batch.column(0), self.path, self.text_field)

    def key(self) -> str:
        return f"{_stamp(self.path)} {self.group} {self.text_field} {self.side}"


@dataclass(frozen=True)
class ArrowRows:
    """An Arrow file or stream, as `datasets` saves them, each row a document."""

    path: Path
    side: str | None
    text_field: str
    size: int

    def __call__(self) -> Stream:
        import pyarrow

        with pyarrow.memory_map(str(self.path)) as source:
            try:
                batches: Any = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                file = pyarrow.ipc.open_file(source)
                batches = (file.get_batch(i) for i in range(file.num_record_batches))
            for batch in batches:
                yield from documents_of(batch.column(self.text_field), self.path, self.text_field)

    def key(self) -> str:
        return f"{_stamp(self.path)} {self.text_field} {self.side}"


@dataclass(frozen=True)
class HubRows:
    """Rows of a data set of the library `datasets`, which reads them from disk or network."""

    rows: Any  # a Dataset or an IterableDataset
    name: str  # with all that decides which rows they are
    side: str | None
    text_field: str
    size: int

    def __call__(self) -> Stream:
        for row in self.rows:
            yield None
            try:
                yield text_of(row, self.text_field)
            except ValueError as error:
                raise DataError("data.text_field", f"{self.name}: {error}") from None

    def key(self) -> str:
        return f"{self.name} {self.text_field} {self.side}"


def text_of(row: Any, text_field: str) -> str:
    """Return the text of a row. Raises ValueError if it has none."""
    if not isinstance(row, dict):
        raise ValueError("it is no object with fields")
    if text_field not in row:
        raise ValueError(f"it has no field {text_field!r}, only {', '.join(sorted(row))[:200]}")
    if not isinstance(row[text_field], str):
        raise ValueError(f"its field {text_field!r} is no text")
    return row[text_field]


def documents_of(column: Any, path: Path, text_field: str) -> Stream:
    """Yield the documents of an Arrow column."""
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
        places = sorted({0, tail, *(_safe_cut(raw, at) for at in range(length, size, length))})
    ends = [*places[1:], size]
    return [
        TextSegment(file, start, stop, "val" if start >= tail else side, start in (0, tail))
        for start, stop in zip(places, ends, strict=True)
        if start < stop
    ]


def _safe_cut(file: BinaryIO, at: int) -> int:
    """Return the first place from `at` on where a cut changes no word; the end if there is none."""
    file.seek(max(at - 1, 0))
    place = file.tell()
    before = 0
    while chunk := file.read(READ_BYTES):
        for i, byte in enumerate(chunk):
            if byte in BREAKS and before in VISIBLE and place + i >= at:
                return place + i
            before = byte
        place += len(chunk)
    return place


def json_segments(path: Path, length: int, side: str | None, text_field: str) -> list[Segment]:
    """Cut a JSON Lines file into segments of about `length` bytes."""
    size = path.stat().st_size
    starts = range(0, size, length)
    return [JsonLines(path, start, min(start + length, size), side, text_field) for start in starts]


def parquet_segments(path: Path, side: str | None, text_field: str) -> list[Segment]:
    """Return the row groups of a Parquet file. Raises DataError without such a field."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        meta = file.metadata
    names = [meta.schema.column(i).path for i in range(meta.num_columns)]
    if text_field not in names:
        raise DataError(
            "data.text_field", f"{path} has no field {text_field!r}, only {', '.join(names)}"
        )
    column = names.index(text_field)
    groups = [meta.row_group(i).column(column) for i in range(meta.num_row_groups)]
    return [
        ParquetRows(path, i, side, text_field, group.total_uncompressed_size)
        for i, group in enumerate(groups)
    ]


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
        file.readline()
    return file.tell()


def _stamp(path: Path) -> str:
    """Return what tells whether a file has changed."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
