"""Where text comes from. Each function is the `_target_` of one file in `conf/data`."""

import hashlib
import os
import urllib.request
from http.client import HTTPException
from pathlib import Path

from gptattn.disk import write_atomically
from gptattn.errors import DataError

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def pydocs() -> str:
    """The prose of Python's own language reference, which the standard library carries.

    About 465,000 characters on Python 3.11; other versions differ, so runs compare only under
    one Python (the text's hash is in every summary). Raises DataError where it is left out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "data", "this Python has no pydoc_data.topics; use data=text data.path=FILE_OR_FOLDER"
        ) from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def text(path: str | None, pattern: str = "**/*") -> str:
    """The UTF-8 text of a file, or of all files below a folder that match `pattern`, sorted.

    Hidden files and folders are passed over. Raises DataError, naming the file and the offset,
    for what is missing, empty, binary or not UTF-8.
    """
    if not path:
        raise DataError("data.path", "is not set; give data.path=FILE_OR_FOLDER")
    root = _expanded(path)
    try:
        if not root.is_dir():
            return read_text(root)
    except OSError as error:  # a name too long, a loop of links
        raise DataError("data.path", f"{path[:80]}: {error.strerror}; give another path") from None
    if Path(pattern).anchor:
        raise DataError("data.pattern", f"{pattern!r} is no pattern (not relative); try **/*")
    try:
        files = sorted(f for f in root.glob(pattern) if f.is_file() and not _is_hidden(f, root))
    except ValueError as error:
        raise DataError("data.pattern", f"{pattern!r} is no pattern ({error}); try **/*") from None
    if not files:
        raise DataError("data.path", f"no file below {root} matches data.pattern={pattern}")
    try:
        return "\n".join(read_text(file) for file in files)
    except DataError as error:
        raise DataError(
            error.field, f"{error.message}, or leave it out with data.pattern='**/*.txt'"
        ) from None


def shakespeare(path: str | None, cache_dir: str | None = None) -> str:
    """Tiny Shakespeare, from `path`, or fetched once; its sha256 must be the canonical one."""
    file = cache_folder(cache_dir) / "tinyshakespeare.txt"
    if path is not None:
        file = _expanded(path)
    elif not file.exists():
        _fetch(SHAKESPEARE_URL, file)
    content = read_text(file)
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


def read_text(path: Path) -> str:
    """The text of one file. Raises DataError, naming the file and the offset of what is wrong."""
    if not path.exists():
        raise DataError("data.path", f"{path} does not exist; give a UTF-8 text file or a folder")
    if not path.is_file():
        raise DataError("data.path", f"{path} is not a regular file; give a UTF-8 text file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError("data.path", f"{path} cannot be read ({error.strerror})") from None
    if not raw:
        raise DataError("data.path", f"{path} is empty; give a file with text in it")
    nul = raw.find(0)
    if nul >= 0:
        raise DataError(
            "data.path", f"{path} is binary (NUL at byte {nul}); give a UTF-8 text file"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            "data.path",
            f"{path} is not UTF-8 (byte {raw[error.start]:#04x} at offset {error.start}); "
            "convert it, with iconv for example",
        ) from None


def cache_folder(cache_dir: str | None) -> Path:
    """The folder for token files and fetched texts; by default the user's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "gptattn"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError("data.path", f"{path} has no such home; give the whole path") from None


def _is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _fetch(url: str, file: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=4) as response:
            raw = response.read()
        # Before the rename: a captive portal's page must not stay in the cache.
        _check_shakespeare(raw)
    except (OSError, HTTPException) as error:
        raise DataError(
            "data", f"cannot fetch {url} ({error}); put the file in place and give data.path=FILE"
        ) from None
    write_atomically(file, lambda target: target.write(raw))
