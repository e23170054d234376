"""Texts: Python's own, the user's file or folder, Tiny Shakespeare."""

import hashlib
import importlib.util
import os
import sysconfig
import urllib.request
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from http.client import HTTPException
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from gptattn.data.run_data import Request
from gptattn.data.tokenizer import SEPARATOR, Piece, Tokenizer, utf8
from gptattn.data.tokens import TokenSource, TokenWriter, stamp_file
from gptattn.errors import DataError
from gptattn.machine.disk import expand_path, walk_once, write_atomically
from gptattn.machine.read_progress import show_progress
from gptattn.machine.source_code import version_of

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Left out: installed packages, tests, the reference (`PythonDocs`), and files that vary by build.
OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
BUILT = "_sysconfigdata"
HELD_OUT = 1 / 20  # of the files; some 600 kB
ENCODING = "utf-8-sig"  # UTF-8, perhaps after a byte order mark
PIECE = 2**16  # characters read at once
BATCH = 64  # pieces encoded at once, on all cores if the tokenizer can
ADVICE = "; convert it (iconv, for example), or choose files: data.pattern='**/*.txt'"


class TextSource(TokenSource):
    """A text: documents to train on, and documents or ends of documents to hold out."""

    separated = True  # separators stand between documents

    @abstractmethod
    def pieces(self, val_fraction: float) -> Iterator[Piece]:
        """Yield the documents in pieces: of each, first the training part, then the held-out part.

        Raises DataError, naming file and place, for what is not text.
        """

    def size(self) -> int:
        """Return the bytes of the text, for the progress bar; 0: unknown."""
        return 0

    def write_tokens(self, request: Request, train: TokenWriter, val: TokenWriter) -> str:
        tokenizer, fraction = request.tokenizer, request.val_fraction
        tokenizer.fit(_cut(tokenizer, self._read(fraction)))
        separator = tokenizer.separator() if self.separated else np.empty(0, np.uint16)
        val.context = len(separator)
        digest = hashlib.sha256()
        last = Piece(-1, "", "")
        pieces = _cut(tokenizer, self.pieces(fraction))
        with show_progress(f"data: encoding {self.name}", self.size()) as advance:
            while batch := list(islice(pieces, BATCH)):
                encoded = tokenizer.encode_batch([piece.text for piece in batch])
                for piece, ids in zip(batch, encoded, strict=True):
                    writer = train if piece.side == "train" else val
                    if self.separated and piece.document != last.document:
                        digest.update(f"\0{piece.side}\0".encode())
                    begins = (piece.document, piece.side) != (last.document, last.side)
                    # The separator before the first held-out document is its context.
                    if self.separated and begins and (writer.tokens or writer is val):
                        writer.write(separator, starts=[0])
                    last = piece
                    raw = utf8(piece.text, "data")
                    digest.update(raw)
                    writer.write(ids)
                    advance(len(raw))
        train.documents = 1 + len(train.starts)
        return digest.hexdigest()

    def _read(self, fraction: float) -> Iterator[Piece]:
        """Yield the text as a tokenizer reads it for its vocabulary."""
        if self.separated:
            yield Piece(-1, "", SEPARATOR)  # on neither side
        with show_progress(f"data: reading {self.name}", self.size()) as advance:
            for piece in self.pieces(fraction):
                yield piece
                advance(len(piece.text))  # characters: about as many as bytes


def _cut(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces as the tokenizer cuts them, without empty ones."""
    for (document, side), group in groupby(pieces, lambda piece: (piece.document, piece.side)):
        for text in tokenizer.cut(piece.text for piece in group):
            if text:
                yield Piece(document, side, text)


Document = Path | str  # a file of UTF-8 text, or a text in memory


def read_document(document: Document) -> Iterator[str]:
    """Yield the text in pieces; a byte order mark is dropped, and line ends become line feeds.

    Raises DataError, naming the file, where it is not text.
    """
    if isinstance(document, str):
        yield document
        return
    try:
        with document.open(encoding=ENCODING) as file:
            while piece := file.read(PIECE):
                if "\0" in piece:
                    raise DataError("data", f"{document} is binary{ADVICE}")
                yield piece
    except UnicodeDecodeError:
        raise DataError("data", f"{document} is not UTF-8{ADVICE}") from None
    except OSError as error:
        raise DataError("data", f"{document} cannot be read ({error.strerror})") from None


def _stamp(document: Document) -> str:
    is_file = isinstance(document, Path)
    return stamp_file(document) if is_file else hashlib.sha256(utf8(document, "data")).hexdigest()


def _size(document: Document) -> int:
    return document.stat().st_size if isinstance(document, Path) else len(document)


class PlainText(TextSource):
    """Documents to train on, and documents to hold out; without the latter, the end of each one.

    The ends together have `val_fraction` of the bytes, at least one character.
    """

    def __init__(self, train: Sequence[Document], held_out: Sequence[Document] = ()) -> None:
        self.train, self.held_out = train, held_out
        self.separated = len(train) > 1 or len(held_out) > 0

    def stamp(self) -> str:
        return str([[*map(_stamp, side)] for side in (self.train, self.held_out)])

    def size(self) -> int:
        return sum(map(_size, (*self.train, *self.held_out)))

    def pieces(self, val_fraction: float) -> Iterator[Piece]:
        if not self.held_out:
            yield from _hold_out_tails(self.train, val_fraction)
            return
        sides = [("train", one) for one in self.train] + [("val", one) for one in self.held_out]
        for number, (side, document) in enumerate(sides):
            for text in read_document(document):
                yield Piece(number, side, text)


def _hold_out_tails(documents: Sequence[Document], fraction: float) -> Iterator[Piece]:
    """Yield the documents, with their tails held out; the tokenizer plays no part in the cuts."""
    total = held = 0  # bytes
    for number, document in enumerate(documents):
        size = sum(len(utf8(text, "data")) for text in read_document(document))
        total += size
        # Of the running total, so that many short documents contribute too.
        due = max(1, round(total * fraction))
        cut = size - (due - held)
        for text in read_document(document):
            raw = text.encode()
            # A character that the limit would split goes to the tail.
            head = raw[: max(cut, 0)].decode(errors="ignore")
            cut -= len(raw)
            if head:
                yield Piece(number, "train", head)
            if tail := text[len(head) :]:
                held += len(tail.encode())
                yield Piece(number, "val", tail)


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
        super().__init__(["\n\n".join(topics[name].strip() for name in sorted(topics))])


class PythonSource(PlainText):
    """The Python files below a folder, without tests, sorted by name; each is a document.

    `held_out` is the share of the files to hold out. The hash of a file's name decides, so it
    is on the same side in every version.
    """

    def __init__(self, root: Path, held_out: float) -> None:
        names: list[str] = []
        for folder, below, files in os.walk(root):
            below[:] = set(below) - OUTSIDE  # not walked: installed packages may be far larger
            sources = (f for f in files if f.endswith(".py") and not f.startswith(BUILT))
            names += ((Path(folder) / file).relative_to(root).as_posix() for file in sources)
        train, val = [], []
        for name in sorted(names):
            if _size(root / name):
                share = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
                (val if share < held_out else train).append(root / name)
        super().__init__(train, val)


class StandardLibrary(PythonSource):
    """The source files of Python's standard library; a twentieth of them are held out.

    About 11 MB in 730 files on Python 3.11. Versions differ, so compare runs only under one Python
    (the text's hash is in every summary).
    """

    def __init__(self) -> None:
        super().__init__(Path(sysconfig.get_path("stdlib")), HELD_OUT)


class PackageSource(PythonSource):
    """The source files of an installed package: for one in pure Python, the same on every system.

    `name` is what Python imports. `version` null takes any. `held_out` is the share of files to
    hold out. `even_windows` spreads the training windows evenly over the text. Raises DataError if
    the package is not installed, or has another version.
    """

    def __init__(
        self,
        name: str,
        version: str | None = None,
        held_out: Annotated[float, Meta(gt=0, lt=1)] = HELD_OUT,
        even_windows: bool = False,
    ) -> None:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
        installed = version_of(name)
        if found is None or not found.submodule_search_locations or installed is None:
            wanted = "give the name that Python imports, such as sympy"
            raise DataError("data.name", f"{name} is not an installed package; {wanted}")
        if version not in (None, installed):
            wanted = f"install {version}, or set data.version={installed}, or null for any"
            raise DataError(
                "data.version", f"{name} {installed} is installed, not {version}; {wanted}"
            )
        super().__init__(Path(found.submodule_search_locations[0]), held_out)
        self.even_windows = even_windows


class TextFiles(PlainText):
    """The UTF-8 text of a file, or of all files below a folder that match `pattern`, sorted.

    The file or folder `val_path` is held out, even if it lies below `path`. Hidden and empty files
    are skipped. Raises DataError for a missing text, and while reading, naming the file, for one
    that is binary or not UTF-8.
    """

    def __init__(self, path: str, pattern: str = "**/*", val_path: str | None = None) -> None:
        super().__init__(*find_sides(path, val_path, pattern, pattern))


class Shakespeare(PlainText):
    """Tiny Shakespeare from `path`, or downloaded once to the cache.

    Raises DataError if its sha256 is not the canonical one.
    """

    def __init__(self, path: str | None, cache_dir: str | None = None) -> None:
        kept = cache_folder(cache_dir) / "tinyshakespeare.txt"
        file = find_files(path, "*", "data.path")[0] if path else kept
        raw = file.read_bytes() if path or kept.exists() else _download(SHAKESPEARE_URL)
        digest = hashlib.sha256(raw).hexdigest()
        if digest != SHAKESPEARE_SHA256:
            raise DataError(
                "data.path",
                f"has the sha256 {digest}, but the canonical file has {SHAKESPEARE_SHA256}; "
                "use data=text for another text",
            )
        if not file.exists():
            write_atomically(file, lambda target: target.write(raw))
        super().__init__([file])


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=4) as response:
            return response.read()
    except (OSError, HTTPException) as error:
        raise DataError(
            "data",
            f"cannot fetch {url} ({error}); get the file another way and give data.path=FILE",
        ) from None


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder for token files and downloaded texts; default: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expand_path(cache_dir or f"{base}/gptattn", "cache_dir")


def find_files(path: str, pattern: str, field: str) -> list[Path]:
    """Return the file, or the files below the folder that match, sorted.

    Follows links. Skips hidden and empty files, and folders already read. Raises DataError, naming
    `field`, if there are none.
    """
    root = expand_path(path, field)
    try:
        if not root.exists():
            raise DataError(field, f"{root} does not exist; give a file or a folder")
        found = [root]
        if root.is_dir():
            top, deep, name = pattern.rpartition("**/")
            tops, seen = root.glob(top) if top else [root], set[str]()
            below = (folder for one in tops for folder, *_ in walk_once(one, seen))
            found = [file for folder in (below if deep else [root]) for file in folder.glob(name)]
        # A hidden root counts: the user named it.
        found = [f for f in found if not any(p[0] == "." for p in f.relative_to(root).parts)]
        found = sorted({file for file in found if file.stat().st_size and file.is_file()})
    except (OSError, ValueError, RuntimeError) as error:
        what = f"{path[:80]} with data.pattern={pattern!r} cannot be read ({error})"
        raise DataError(field, f"{what}; give another path, or a pattern such as **/*") from None
    if not found:
        which = f"is empty, or has no file that matches {pattern} and is not empty"
        raise DataError(field, f"{root} {which}; give another file or folder")
    return found


def find_sides(
    path: str, val_path: str | None, pattern: str, val_pattern: str
) -> tuple[list[Path], list[Path]]:
    """Return the files to train on, and those at or below `val_path` to hold out.

    Raises DataError if there are none, or if all are held out.
    """
    held_out = find_files(val_path, val_pattern, "data.val_path") if val_path else []
    apart = {file.resolve() for file in held_out}
    files = find_files(path, pattern, "data.path")
    train = [file for file in files if file.resolve() not in apart]
    if not train:
        raise DataError("data.val_path", "holds out all of data.path; give only a part of it")
    return train, held_out
