"""Where text comes from: the `_target_`s in `conf/data`."""

import functools
import hashlib
import os
import sys
import sysconfig
import urllib.request
from http.client import HTTPException
from pathlib import Path

from gptattn.data.corpus import Corpus
from gptattn.data.text_file import TextFile
from gptattn.errors import DataError
from gptattn.machine.disk import write_atomically

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Not of the library itself: what is installed, its tests, the reference that `pydocs` is, and what
# differs from build to build.
OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
BUILT = "_sysconfigdata"
HELD_OUT = 1 / 20  # of the files; some 600 kB


def pydocs() -> str:
    """Return the prose of Python's own language reference, which the standard library carries.

    About 465,000 characters on Python 3.11. Other versions differ, so compare runs only under one
    Python (the text's hash is in every summary). Raises DataError if this Python lacks the
    reference.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "data", "this Python has no pydoc_data.topics; use data=text data.path=FILE_OR_FOLDER"
        ) from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def stdlib() -> Corpus:
    """Return the source files of Python's standard library, without its tests; each a document.

    About 11 MB in 730 files on Python 3.11, sorted by name. A twentieth of the files is held out,
    by a hash of their names, so a file of another version is on the same side. Versions differ, so
    compare runs only under one Python (the text's hash is in every summary). Raises DataError if
    this Python has no source files.
    """
    left_out: set[str] = set()
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, below, files in os.walk(root):
        below[:] = set(below) - OUTSIDE  # not walked: what is installed may be much more
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
    return Corpus(documents, held_out, left_out)


def text(path: str | None, pattern: str = "**/*", val_path: str | None = None) -> Corpus:
    """Return the UTF-8 text of a file, or of all files below a folder that match `pattern`, sorted.

    The file or folder `val_path` is held out, even if it lies below `path`. Hidden files and
    folders are skipped; empty files in a folder are skipped with a warning. Raises DataError for a
    missing or empty text, and when the text is read, naming file and offset, if it is binary or not
    UTF-8.
    """
    if not path:
        raise DataError("data.path", "is not set; give data.path=FILE_OR_FOLDER")
    left_out: set[str] = set()
    files = _files(path, pattern, "data.path", left_out)
    held_out = _files(val_path, pattern, "data.val_path", left_out) if val_path else []
    apart = {file.path.resolve() for file in held_out}
    documents = [file for file in files if file.path.resolve() not in apart]
    if not documents:
        raise DataError(
            "data.val_path", f"{val_path} holds out all of data.path; give a part of it"
        )
    return Corpus(documents, held_out, left_out)


def _files(path: str, pattern: str, field: str, left_out: set[str]) -> list[TextFile]:
    """The files at or below the path. `field`: the setting that names it."""
    root = expanded(path, field)
    try:
        if root.is_dir():
            return _files_below(root, pattern, field, left_out)
        file = TextFile(root, field, left_out)
        file.check()
        return [file]
    except OSError as error:  # a name too long, a loop of links
        raise DataError(field, f"{path[:80]}: {error.strerror}; give another path") from None


def _files_below(root: Path, pattern: str, field: str, left_out: set[str]) -> list[TextFile]:
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


def shakespeare(path: str | None, cache_dir: str | None = None) -> str:
    """Return Tiny Shakespeare from `path`, or downloaded once to the cache.

    Raises DataError if its sha256 is not the canonical one.
    """
    file = cache_folder(cache_dir) / "tinyshakespeare.txt"
    if path is not None:
        file = expanded(path, "data.path")
    elif not file.exists():
        _fetch(SHAKESPEARE_URL, file)
    source = TextFile(file, "data.path", set())
    source.check()
    content = "".join(source())
    _check_shakespeare(content.encode())
    return content


def _check_shakespeare(raw: bytes) -> None:
    digest = hashlib.sha256(raw).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise DataError(
            "data.path",
            f"sha256 is {digest}, the canonical file has {SHAKESPEARE_SHA256}; "
            "use data=text for another text",
        )


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder for token files and downloaded texts; default: the user's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "gptattn"


def expanded(path: str, field: str) -> Path:
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


def _fetch(url: str, file: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=4) as response:
            raw = response.read()
        # Before writing: a captive portal's page must not stay in the cache.
        _check_shakespeare(raw)
    except (OSError, HTTPException) as error:
        raise DataError(
            "data",
            f"cannot fetch {url} ({error}); get the file another way and give data.path=FILE",
        ) from None
    write_atomically(file, lambda target: target.write(raw))
