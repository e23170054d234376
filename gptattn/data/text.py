"""Plain text: what comes with Python, the user's file or folder, Tiny Shakespeare."""

import codecs
import functools
import hashlib
import io
import os
import sys
import sysconfig
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from gptattn.data.tokenizer import utf8
from gptattn.data.tokens import TextSource
from gptattn.errors import DataError
from gptattn.machine.disk import write_atomically

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Left out: installed packages, tests, the reference that is `PythonDocs`, and whatever differs from
# build to build.
OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
BUILT = "_sysconfigdata"
HELD_OUT = 1 / 20  # of the files; some 600 kB
PIECE = 2**20  # bytes or characters held at a time


class Scan(NamedTuple):
    """What is known after reading a document to its end."""

    sha256: str  # of its UTF-8
    characters: int
    bytes: int


class Document(ABC):
    """A text that is read in pieces, always from its beginning."""

    @abstractmethod
    def __call__(self) -> Iterator[str]:
        """Yield the text in pieces."""

    @abstractmethod
    def stamp(self) -> str:
        """Return a string that differs once the text has changed."""

    @abstractmethod
    def size(self) -> int:
        """Return about how many bytes it has."""

    @functools.cached_property
    def scan(self) -> Scan:
        """What the first reading found."""
        digest, characters, size = hashlib.sha256(), 0, 0
        for piece in self():
            raw = utf8(piece, "data")
            digest.update(raw)
            characters += len(piece)
            size += len(raw)
        return Scan(digest.hexdigest(), characters, size)

    def part(self, start: int, stop: int) -> Iterator[str]:
        """Yield the characters `start` .. `stop` - 1, in pieces."""
        place = 0
        for piece in self():
            if found := piece[max(0, start - place) : max(0, stop - place)]:
                yield found
            place += len(piece)

    def count_characters(self, size: int) -> int:
        """Return how many characters fit into the first `size` bytes."""
        count = 0
        for piece in self():
            raw = piece.encode()
            if len(raw) > size:
                return count + len(raw[:size].decode(errors="ignore"))
            size -= len(raw)
            count += len(piece)
        return count


@dataclass(frozen=True)
class TextFile(Document):
    """A file of UTF-8 text.

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

    def stamp(self) -> str:
        return stamp_file(self.path)

    def size(self) -> int:
        return self.path.stat().st_size

    def __call__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        lines = io.IncrementalNewlineDecoder(None, translate=True)
        offset = 0
        for raw in self._read():
            nul = raw.find(0)
            if nul >= 0:
                raise self._wrong(f"is binary (NUL at byte {offset + nul}); give a UTF-8 text file")
            begun = len(decoder.getstate()[0])  # bytes of a character cut in two by a piece
            try:
                piece = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise self._wrong(
                    f"is not UTF-8 (byte {error.object[error.start]:#04x} at offset "
                    f"{offset - begun + error.start}); convert it, with iconv for example"
                ) from None
            if offset == 0 and piece.startswith("\ufeff"):
                self.left_out.add("byte order mark")
                piece = piece[1:]
            offset += len(raw)
            if piece := lines.decode(piece, final=not raw):
                yield piece
        if any("\r" in ending for ending in lines.newlines or ()):
            self.left_out.add("CR")

    def _read(self) -> Iterator[bytes]:
        """Yield the file's bytes in pieces, and at the end an empty one."""
        try:
            with self.path.open("rb") as file:
                while raw := file.read(PIECE):
                    yield raw
        except OSError as error:
            raise self._wrong(f"cannot be read ({error.strerror})") from None
        yield b""

    def _wrong(self, what: str) -> DataError:
        return DataError(self.field, f"{self.path} {what}{self.advice}")


@dataclass(frozen=True)
class HeldText(Document):
    """A text in memory."""

    text: str

    def stamp(self) -> str:
        return hashlib.sha256(utf8(self.text, "data")).hexdigest()

    def size(self) -> int:
        return len(self.text)

    def __call__(self) -> Iterator[str]:
        return (self.text[i : i + PIECE] for i in range(0, len(self.text), PIECE))


class PlainText(TextSource):
    """Whole documents, and others to hold out; without those, the documents' tails are held out.

    The tail of a single document has `val_fraction` of its bytes; the tails of several documents
    together have `val_fraction` of the characters. A tail is at least one character.
    """

    def __init__(
        self,
        train: Sequence[Document],
        held_out: Sequence[Document] = (),
        left_out: set[str] | None = None,
    ) -> None:
        self.train, self.held_out = train, held_out
        self.left_out = set() if left_out is None else left_out
        self.separated = len(train) > 1 or len(held_out) > 0

    def stamp(self) -> str:
        return str(
            [[document.stamp() for document in side] for side in (self.train, self.held_out)]
        )

    def size(self) -> int:
        return sum(document.size() for document in (*self.train, *self.held_out))

    def documents(self, val_fraction: float) -> Iterator[tuple[str, Iterator[str]]]:
        ends = [document.scan.characters for document in self.train]
        cuts = ends if self.held_out else _cut_tails(self.train, val_fraction)
        for document, cut in zip(self.train, cuts, strict=True):
            yield "train", document.part(0, cut)
        for document, cut, end in zip(self.train, cuts, ends, strict=True):
            if cut < end:
                yield "val", document.part(cut, end)
        for document in self.held_out:
            yield "val", document.part(0, document.scan.characters)

    def text_sha256(self) -> str:
        """Return a hash of the documents, the held-out documents, and where documents end.

        For a single document, with none held out, it is the SHA-256 of its UTF-8.
        """
        train, held_out = (
            [document.scan.sha256 for document in side] for side in (self.train, self.held_out)
        )
        if not self.separated:
            return train[0]
        return hashlib.sha256("\n".join([*train, "held out", *held_out]).encode()).hexdigest()

    def facts(self, documents: int) -> dict[str, Any]:
        return {
            "documents": len(self.train),
            "held_out": "documents" if self.held_out else "tails",
            "left_out": sorted(self.left_out),
        }


def _cut_tails(documents: Sequence[Document], fraction: float) -> list[int]:
    """Return the character at which each document's tail begins, whatever the tokenizer."""
    if len(documents) == 1:
        # A character that the limit would cut goes to the tail.
        size = documents[0].scan.bytes
        return [documents[0].count_characters(size - max(1, round(size * fraction)))]
    cuts, total, held = [], 0, 0
    for document in documents:
        total += document.scan.characters
        # Rounding the running total lets many short documents give their share too.
        due = max(1, round(total * fraction))
        cuts.append(document.scan.characters - (due - held))
        held = due
    return cuts


class PythonDocs(PlainText):
    """The prose of Python's language reference, which is part of the standard library.

    About 465,000 characters on Python 3.11. Other versions differ, so compare runs only under one
    Python (the text's hash is in every summary). Raises DataError if this Python lacks the
    reference.
    """

    def __init__(self) -> None:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise DataError(
                "data",
                "this Python has no pydoc_data.topics; use data=text data.path=FILE_OR_FOLDER",
            ) from None
        super().__init__([HeldText("\n\n".join(topics[name].strip() for name in sorted(topics)))])


class StandardLibrary(PlainText):
    """The source files of Python's standard library, without its tests; each a document.

    About 11 MB in 730 files on Python 3.11, sorted by name. A twentieth of the files is held out,
    by a hash of their names, so a file is on the same side in every version. Versions differ, so
    compare runs only under one Python (the text's hash is in every summary). Raises DataError if
    this Python has no source files.
    """

    def __init__(self) -> None:
        left_out: set[str] = set()
        root = Path(sysconfig.get_path("stdlib"))
        names: list[str] = []
        for folder, below, files in os.walk(root):
            below[:] = set(below) - OUTSIDE  # not walked: installed packages may be far larger
            sources = (f for f in files if f.endswith(".py") and not f.startswith(BUILT))
            names += ((Path(folder) / file).relative_to(root).as_posix() for file in sources)
        documents, held_out = [], []
        for name in sorted(names):
            file = TextFile(root / name, "data", left_out)
            if not file.is_empty():
                share = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
                (held_out if share < HELD_OUT else documents).append(file)
        if not (documents and held_out):
            raise DataError(
                "data", f"no source files in {root}; use data=text data.path=FILE_OR_FOLDER"
            )
        super().__init__(documents, held_out, left_out)


class TextFiles(PlainText):
    """The UTF-8 text of a file, or of all files below a folder that match `pattern`, sorted.

    The file or folder `val_path` is held out, even if it lies below `path`. Hidden files and
    folders are skipped; empty files in a folder are skipped with a warning. Raises DataError for a
    missing or empty text, and when the text is read, naming file and offset, if it is binary or not
    UTF-8.
    """

    def __init__(self, path: str | None, pattern: str = "**/*", val_path: str | None = None):
        if not path:
            raise DataError("data.path", "is not set; give data.path=FILE_OR_FOLDER")
        left_out: set[str] = set()
        files = _find_files(path, pattern, "data.path", left_out)
        held_out = _find_files(val_path, pattern, "data.val_path", left_out) if val_path else []
        apart = {file.path.resolve() for file in held_out}
        documents = [file for file in files if file.path.resolve() not in apart]
        if not documents:
            raise DataError(
                "data.val_path", f"{val_path} holds out all of data.path; give a part of it"
            )
        super().__init__(documents, held_out, left_out)


def _find_files(path: str, pattern: str, field: str, left_out: set[str]) -> list[TextFile]:
    """Return the files at or below the path. `field`: the setting that names it."""
    root = expand(path, field)
    try:
        if root.is_dir():
            return _find_below(root, pattern, field, left_out)
        file = TextFile(root, field, left_out)
        file.check()
        return [file]
    except OSError as error:  # a name too long, a loop of links
        raise DataError(field, f"{path[:80]}: {error.strerror}; give another path") from None


def _find_below(root: Path, pattern: str, field: str, left_out: set[str]) -> list[TextFile]:
    if Path(pattern).anchor:
        raise DataError("data.pattern", f"{pattern!r} is not a relative pattern; try **/*")
    try:
        paths = sorted(f for f in root.glob(pattern) if f.is_file() and not is_hidden(f, root))
    except ValueError as error:
        raise DataError(
            "data.pattern", f"{pattern!r} is not a pattern ({error}); try **/*"
        ) from None
    advice = ", or leave it out with data.pattern='**/*.txt'"
    files = [TextFile(file, field, left_out, advice) for file in paths]
    empty = [file.path for file in files if file.is_empty()]
    if len(empty) == len(files):
        which = "no file with text in it" if empty else "no file"
        raise DataError(field, f"{which} below {root} matches data.pattern={pattern}")
    if empty:
        _warn_of_empty(field, tuple(map(str, empty)))
    return [file for file in files if file.path not in empty]


@functools.cache  # the checks and the run both load the text: warn once
def _warn_of_empty(field: str, files: tuple[str, ...]) -> None:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    named = ", ".join(files[:3])
    print(f"warning: {field}: empty files skipped: {named}{more}", file=sys.stderr)


class Shakespeare(PlainText):
    """Tiny Shakespeare from `path`, or downloaded once to the cache.

    Raises DataError if its sha256 is not the canonical one.
    """

    def __init__(self, path: str | None, cache_dir: str | None = None) -> None:
        file = cache_folder(cache_dir) / "tinyshakespeare.txt"
        if path is not None:
            file = expand(path, "data.path")
        elif not file.exists():
            _fetch(SHAKESPEARE_URL, file)
        source = TextFile(file, "data.path", set())
        source.check()
        _check_shakespeare(source.scan.sha256)
        super().__init__([source])


def _check_shakespeare(digest: str) -> None:
    if digest != SHAKESPEARE_SHA256:
        raise DataError(
            "data.path",
            f"sha256 is {digest}, the canonical file has {SHAKESPEARE_SHA256}; "
            "use data=text for another text",
        )


def _fetch(url: str, file: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=4) as response:
            raw = response.read()
    except (OSError, HTTPException) as error:
        raise DataError(
            "data",
            f"cannot fetch {url} ({error}); get the file another way and give data.path=FILE",
        ) from None
    # Before writing: a captive portal's page must not end up in the cache.
    _check_shakespeare(hashlib.sha256(raw).hexdigest())
    write_atomically(file, lambda target: target.write(raw))


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder for token files and downloaded texts; default: the user's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "gptattn"


def expand(path: str, field: str) -> Path:
    """Return the path with the home folder for ~. Raises DataError if that is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(
            field, f"{path} names an unknown home folder; give the whole path"
        ) from None


def is_hidden(file: Path, root: Path) -> bool:
    """Return whether a file below `root`, or a folder on the way to it, is hidden."""
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def stamp_file(path: Path) -> str:
    """Return a string that changes with the file: its path, size and modification time."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
