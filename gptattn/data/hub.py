"""The Hugging Face hub: folders named `hf:owner/name[@revision]`, and rows with a text each."""

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gptattn.data.text import expand, find_sides
from gptattn.data.tokenizer import utf8
from gptattn.data.tokens import Part, TextSource, stamp_file
from gptattn.errors import CheckpointError, ConfigError, DataError, UserError
from gptattn.machine.disk import REFUSALS

NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
PREFIX = "hf:"
# Suffix of a local file -> its reader in the library `datasets`.
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".arrow": "arrow"}
NOTES = {"dataset_info.json", "dataset_dict.json", "state.json"}  # that `datasets` saves as well
BATCH_ROWS = 1000  # read at a time


def is_hub_name(name: str) -> bool:
    """Return whether `name` begins with `hf:`, without looking at the disk."""
    return name.startswith(PREFIX)


def local_folder(name: str, field: str, files: Sequence[str]) -> Path:
    """Return the folder that `name` stands for; from the hub, only `files` are downloaded.

    Without a network, the hub's own cache is used. Raises ConfigError for a malformed name or
    without the extra `hf`, CheckpointError for what cannot be fetched.
    """
    if not is_hub_name(name):
        return expand(name, field)
    match = NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(
            field, f"{name!r} is not a name on the hub; give hf:owner/name[@revision]"
        )
    return _fetch(match["repo"], match["revision"], field, tuple(files))


@cache  # a run asks twice: during its checks and when it starts
def _fetch(repo: str, revision: str | None, field: str, files: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            field, f"{PREFIX}{repo} needs the extra hf: pip install 'gptattn[hf]'"
        ) from None
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the library's own, and those of its two transport libraries
        where = repo if revision is None else f"{repo}@{revision}"
        raise CheckpointError(
            field,
            f"{PREFIX}{where} cannot be fetched ({_first_line(error)}); check the name, the "
            "network and your login (hf auth login), or give a folder",
        ) from None


def _first_line(error: Exception) -> str:
    """Return a library's error in one line; raise it if the disk refused."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in REFUSALS:
        raise error
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]]).rstrip(".")


class Rows(TextSource):
    """Rows with a text each, of a data set on the hub or of local files; each row is a document.

    `path`, and `val_path` to hold out: a Parquet, JSON Lines or Arrow file, or a folder of them.
    Without `val_split` or `val_path`, the hash of each document decides whether it is held out.
    `streaming`: rows come over the network each time and none is stored. Raises ConfigError without
    the library `datasets`, DataError for what is missing or has no such field.
    """

    def __init__(
        self,
        name: str | None,
        config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        text_field: str = "text",
        streaming: bool = False,
        revision: str | None = None,
        path: str | None = None,
        val_path: str | None = None,
    ) -> None:
        if (name is None) == (path is None):
            raise ConfigError(
                "data.name", "give data.name=owner/name of the hub, or data.path=FILE_OR_FOLDER"
            )
        if val_split and (path is not None or val_split == split):
            raise ConfigError(
                "data.val_split", "is another split of data.name; for files, give data.val_path"
            )
        if val_path and path is None:
            raise ConfigError("data.val_path", "goes with data.path; here, give data.val_split")
        self.name = name or str(path)
        self._text_field, self._streaming, self._revision = text_field, streaming, revision
        self._load = cache(_load)  # to look for its files, and to read it
        self._files: list[Path] = []
        side = "train" if val_split or val_path else None  # None: the hash of each row decides
        # Of each part: its side, its name in messages, and what `datasets` is asked for.
        self._parts: list[tuple[str | None, str, dict[str, Any]]] = []
        if path is not None:
            train, held_out = _find_files(path, val_path)
            self._files = [*train, *held_out]
            for file in self._files:
                asked = {"path": READERS[file.suffix], "data_files": str(file), "split": "train"}
                found = "val" if file in held_out else side
                self._parts.append((found, str(file), {**asked, "streaming": True}))
            return
        asked = {"path": name, "name": config, "revision": revision, "streaming": streaming}
        self._parts.append((side, self.name, {**asked, "split": split}))
        if val_split:
            self._parts.append(("val", self.name, {**asked, "split": val_split}))

    def stamp(self) -> str:
        if self._files:
            state = [stamp_file(file) for file in self._files]
        elif self._streaming:
            with _named_errors(self.name):
                from huggingface_hub import HfApi

                state = HfApi().dataset_info(self.name, revision=self._revision).sha
        else:  # the library's cache names its files after their content
            state = [
                sorted(file["filename"] for file in self._load(where, **asked).cache_files)
                for _, where, asked in self._parts
            ]
        return str([self._parts, self._text_field, state])

    def size(self) -> int:
        if self._files:
            return sum(file.stat().st_size for file in self._files)
        _, where, asked = self._parts[0]
        return self._load(where, **asked).info.dataset_size or 0

    def documents(self, val_fraction: float) -> Iterator[list[Part]]:
        for side, where, asked in self._parts:
            for text in self._read_texts(where, asked):
                yield [(side or _choose_side(text, val_fraction), text)]

    def _read_texts(self, where: str, asked: dict[str, Any]) -> Iterator[str]:
        field, rows = self._text_field, self._load(where, **asked)
        with _named_errors(where):
            for table in rows.with_format("arrow").iter(BATCH_ROWS):
                if field not in table.column_names:
                    raise DataError(
                        "data.text_field",
                        f"{where} has no field {field!r}, only {', '.join(table.column_names)}",
                    )
                for text in table.column(field).to_pylist():
                    if not isinstance(text, str):
                        raise DataError(
                            "data.text_field", f"{where}: a row's {field!r} is not text"
                        )
                    yield text


def _load(where: str, **asked: Any) -> Any:
    """Return the rows of a split or of a local file, as the library `datasets` reads them."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("data", "hf needs the extra hf: pip install 'gptattn[hf]'") from None
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs what it raises
    with _named_errors(where):
        return datasets.load_dataset(**asked)


@contextlib.contextmanager
def _named_errors(where: str) -> Iterator[None]:
    """Turn the errors of `datasets` and of its transport libraries into a DataError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            "data",
            f"{where} cannot be read ({_first_line(error)}); check its name, its format, "
            "data.config, data.split and the network",
        ) from None


def _find_files(path: str, val_path: str | None) -> tuple[list[Path], list[Path]]:
    """Return the files of rows to train on, and those to hold out."""
    train, held_out = (
        [file for file in side if file.suffix in READERS and file.name not in NOTES]
        for side in find_sides(path, val_path, "**/*")
    )
    for field, named, files in (("path", path, train), ("val_path", val_path, held_out)):
        if named and not files:
            has = f"{named} has no {', '.join(READERS)}"
            raise DataError(f"data.{field}", f"{has}; for plain text, use data=text")
    return train, held_out


def _choose_side(document: str, val_fraction: float) -> str:
    """Return the side of a document, by its hash: the same wherever it appears."""
    digest = hashlib.sha256(utf8(document, "data")).hexdigest()
    return "val" if int(digest[:8], 16) < val_fraction * 2**32 else "train"
