"""A file of text, read in pieces."""

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptattn.errors import DataError

PIECE_BYTES = 2**20  # held at a time


@dataclass(frozen=True)
class TextFile:
    """A file of UTF-8 text; a call reads it in pieces.

    A byte order mark is dropped, and line ends become line feeds; `left_out` collects which of
    these occurred. Raises DataError, naming the file and the offset, if it is not text.
    """

    path: Path
    field: str  # the setting that named it
    left_out: set[str]
    advice: str = ""  # added to the end of error messages

    def is_empty(self) -> bool:
        """Return whether the file has no text in it."""
        # A byte order mark alone has three bytes.
        return self.path.stat().st_size <= 3 and not any(self())

    def check(self) -> None:
        """Raise DataError unless this is a regular file with text in it."""
        if not self.path.exists():
            raise self._wrong("does not exist; give a UTF-8 text file or a folder")
        if not self.path.is_file():
            raise self._wrong("is not a regular file; give a UTF-8 text file")
        if self.is_empty():
            raise self._wrong("is empty; give a file with text in it")

    def __call__(self) -> Iterator[str]:
        return self.part(0, None)

    def part(self, start: int, stop: int | None) -> Iterator[str]:
        """Yield the text of the bytes `start` .. `stop` - 1, in pieces; None: up to the end.

        Neither may lie within a character, or between CR and LF.
        """
        utf8 = codecs.getincrementaldecoder("utf-8")()
        lines = io.IncrementalNewlineDecoder(None, translate=True)
        for offset, raw in self._raw(start, stop):
            nul = raw.find(0)
            if nul >= 0:
                raise self._wrong(f"is binary (NUL at byte {offset + nul}); give a UTF-8 text file")
            begun = len(utf8.getstate()[0])  # bytes of a character that the last piece cut in two
            try:
                piece = utf8.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise self._wrong(
                    f"is not UTF-8 (byte {error.object[error.start]:#04x} at offset "
                    f"{offset - begun + error.start}); convert it, with iconv for example"
                ) from None
            if offset == 0 and piece.startswith("\ufeff"):
                self.left_out.add("byte order mark")
                piece = piece[1:]
            if piece := lines.decode(piece, final=not raw):
                yield piece
        if any("\r" in ending for ending in lines.newlines or ()):
            self.left_out.add("CR")

    def _raw(self, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of each piece, and at the end one without bytes."""
        offset = start
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                while raw := file.read(
                    PIECE_BYTES if stop is None else min(PIECE_BYTES, stop - offset)
                ):
                    yield offset, raw
                    offset += len(raw)
        except OSError as error:
            raise self._wrong(f"cannot be read ({error.strerror})") from None
        yield offset, b""

    def _wrong(self, what: str) -> DataError:
        return DataError(self.field, f"{self.path} {what}{self.advice}")
