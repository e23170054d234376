"""The Hugging Face hub: folders named `hf:owner/name[@revision]`, and rows with a text each."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gptattn.data.text import expand, is_hidden, stamp_file
from gptattn.data.tokenizer import utf8
from gptattn.data.tokens import TextSource
from gptattn.errors import CheckpointError, ConfigError, DataError
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
        try:
            return Path(name).expanduser()
        except RuntimeError:
            raise ConfigError(
                field, f"{name} names an unknown home folder; give the whole path"
            ) from None
    match = NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(
            field, f"{name!r} is not a name on the hub; give hf:owner/name[@revision]"
        )
    return _fetch(match["repo"], match["revision"], field, tuple(files))


@cache  # a run asks twice: during its checks and when it starts
def _fetch(repo: str, revision: str | None, field: str, files: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ConfigError(
            field, f"{PREFIX}{repo} needs the extra hf: pip install 'gptattn[hf]'"
        ) from None
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision}"
    except errors.RepositoryNotFoundError:
        reason = "does not exist or needs a login (hf auth login)"
    # The library raises its own errors and those of its two transport libraries.
    except Exception as error:
        reason = f"cannot be fetched ({_first_line(error).removeprefix('Got: ')})"
    raise CheckpointError(
        field, f"{PREFIX}{repo} {reason}; check the name and the network, or give a folder"
    )


def _first_line(error: Exception) -> str:
    """Return the first line of a library's error; raise it if the disk refused."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in REFUSALS:
        raise error
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


class Rows(TextSource):
    """Rows with a text each, of a data set on the hub or of local files; each row is a document.

    `path`, and `val_path` to hold out: a Parquet, JSON Lines or Arrow file, or a folder of them.
    Without `val_split` or `val_path`, the hash of each document decides whether it is held out.
    `streaming`: rows come over the network each time and none is stored. Raises ConfigError without
    the library `datasets`, DataError for what is missing or has no such field.
    """

    leads = True

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
        if path is not None and val_split:
            raise ConfigError(
                "data.val_split", "goes with data.name; here, give data.val_path=FILE"
            )
        if name is not None and val_path:
            raise ConfigError(
                "data.val_path", "goes with data.path; here, give data.val_split=NAME"
            )
        if name is not None and val_split == split:
            raise ConfigError("data.val_split", f"{split} is trained on; give another split")
        self.name = name or str(path)
        self._text_field, self._streaming = text_field, streaming
        self._hub = None if name is None else (name, config, revision)
        side = "train" if val_split or val_path else None  # None: the hash of each row decides
        # (side, split on the hub or local file)
        self._parts: list[tuple[str | None, Any]] = [(side, split)]
        if val_split:
            self._parts.append(("val", val_split))
        if path is not None:
            train, held_out = _find_files(path, val_path)
            self._parts = [(side, file) for file in train] + [("val", file) for file in held_out]

    def stamp(self) -> str:
        if self._hub is None:
            parts = [(side, stamp_file(file)) for side, file in self._parts]
            return str([parts, self._text_field])
        name, _, revision = self._hub
        if self._streaming:
            state = _stamp_folder(Path(name)) if Path(name).is_dir() else _commit(name, revision)
        else:  # the library's cache names its files after their content
            state = [
                sorted(file["filename"] for file in self._open(part).cache_files)
                for _, part in self._parts
            ]
        return str([self._hub, self._parts, self._text_field, state])

    def size(self) -> int:
        if self._hub is None:
            return sum(file.stat().st_size for _, file in self._parts)
        return sum(self._open(part).info.dataset_size or 0 for _, part in self._parts[:1])

    def _open(self, part: Any) -> Any:
        """Return the rows of a split or of a local file, as the library reads them."""
        try:
            import datasets
        except ImportError:
            raise ConfigError("data", "hf needs the extra hf: pip install 'gptattn[hf]'") from None
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs what it raises
        if self._hub is None:
            reader = READERS[part.suffix]
            return datasets.load_dataset(
                reader, data_files=[str(part)], split="train", streaming=True
            )
        return _load_split(*self._hub, part, self._streaming)

    def documents(self, val_fraction: float) -> Iterator[tuple[str, list[str]]]:
        for side, part in self._parts:
            for text in self._texts(part):
                yield side or _choose_side(text, val_fraction), [text]

    def _texts(self, part: Any) -> Iterator[str]:
        where = str(part) if self._hub is None else self.name
        field = self._text_field
        batches = self._batches(part, where)
        for table in batches:
            if field not in table.column_names:
                raise DataError(
                    "data.text_field",
                    f"{where} has no field {field!r}, only {', '.join(table.column_names)}",
                )
            for text in table.column(field).to_pylist():
                if not isinstance(text, str):
                    raise DataError("data.text_field", f"{where}: a row's {field!r} is not text")
                yield text

    def _batches(self, part: Any, where: str) -> Iterator[Any]:
        """Yield tables of rows. Raises DataError with the library's words on a damaged file."""
        try:
            yield from self._open(part).with_format("arrow").iter(BATCH_ROWS)
        # The library raises its own errors and those of its transport libraries.
        except (ConfigError, DataError):
            raise
        except Exception as error:
            field = "data" if self._hub is None else "data.name"
            reason = f"{where} cannot be read ({_first_line(error)}); it may be damaged"
            raise DataError(field, reason) from None

    def facts(self, documents: int) -> dict[str, Any]:
        return {"documents": documents, "held_out": "documents"}


@cache  # to look for its files, and to read it
def _load_split(
    name: str, config: str | None, revision: str | None, split: str, streaming: bool
) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            name, config, split=split, revision=revision, streaming=streaming
        )
    except Exception as error:  # the library's own, and those of its transport libraries
        raise DataError(
            "data.name",
            f"{name} cannot be loaded ({_first_line(error)}); check data.name, data.config, "
            "data.split and the network",
        ) from None


def _find_files(path: str, val_path: str | None) -> tuple[list[Path], list[Path]]:
    """Return the files to train on, and those to hold out."""
    held_out = _find_below(val_path, "data.val_path") if val_path else []
    apart = {file.resolve() for file in held_out}
    files = [file for file in _find_below(path, "data.path") if file.resolve() not in apart]
    if not files:
        raise DataError(
            "data.val_path", f"{val_path} holds out all of data.path; give a part of it"
        )
    return files, held_out


def _find_below(path: str, field: str) -> list[Path]:
    """Return the files at or below the path, without hidden ones."""
    root = expand(path, field)
    if not root.exists():
        raise DataError(field, f"{root} does not exist; give a file or a folder")
    files = [root]
    if root.is_dir():
        files = [file for file in sorted(root.rglob("*")) if not is_hidden(file, root)]
    files = [f for f in files if f.suffix in READERS and f.name not in NOTES and f.is_file()]
    if not files:
        raise DataError(field, f"{root} has no {', '.join(READERS)}; for plain text, use data=text")
    return files


def _choose_side(document: str, val_fraction: float) -> str:
    """Return the side of a document, by its hash: the same wherever it appears."""
    digest = hashlib.sha256(utf8(document, "data")).hexdigest()
    return "val" if int(digest[:8], 16) < val_fraction * 2**32 else "train"


def _stamp_folder(folder: Path) -> list[str]:
    return [stamp_file(file) for file in sorted(folder.rglob("*")) if file.is_file()]


def _commit(name: str, revision: str | None) -> str | None:
    """Return the commit that a revision of a data set on the hub is now."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:
        raise DataError(
            "data.name",
            f"{name} cannot be loaded ({_first_line(error)}); check data.name and the network",
        ) from None
