"""The Hugging Face hub: folders named `hf:owner/name[@revision]`, and rows of text."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from gptattn.data.text import TextSource, find_sides
from gptattn.data.tokenizer import Piece, utf8
from gptattn.data.tokens import stamp_file
from gptattn.errors import CheckpointError, ConfigError, DataError, UserError
from gptattn.machine.disk import REFUSALS, expand_path

NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
PREFIX = "hf:"
SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")  # of local files
NOTES = {"dataset_info.json", "dataset_dict.json", "state.json"}  # that `datasets` saves as well
BATCH_ROWS = 1000  # read at once


def local_folder(name: str, field: str, files: Sequence[str]) -> Path:
    """Return the folder that `name` stands for; from the hub, download only `files`.

    Without a network, use the hub's own cache. Raises ConfigError for a malformed name or a missing
    extra `hf`, CheckpointError for what cannot be fetched.
    """
    if not name.startswith(PREFIX):
        return expand_path(name, field)
    match = NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(
            field, f"{name!r} is not a name on the hub; give hf:owner/name[@revision]"
        )
    hub = _import_extra("huggingface_hub", field, name)
    advice = "check the name, the network and your login (hf auth login), or give a folder"
    with name_errors(CheckpointError, field, name, advice):
        repo, revision = match["repo"], match["revision"]
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=list(files)))


def _import_extra(library: str, field: str, where: str) -> ModuleType:
    try:
        return import_module(library)
    except ImportError:
        raise ConfigError(field, f"{where} needs the extra hf: pip install 'gptattn[hf]'") from None


@contextlib.contextmanager
def name_errors(kind: type[UserError], field: str, where: str, advice: str) -> Iterator[None]:
    """Turn any error of the libraries and of their transport into one of this kind.

    Errors of the disk stay as they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | MemoryError) or getattr(error, "errno", None) in REFUSALS:
            raise
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]]).rstrip(".")
        raise kind(field, f"{where} cannot be read ({reason}); {advice}") from None


class Rows(TextSource):
    """Rows of text, from a data set on the hub or from local files; each row is a document.

    `path`, and `val_path` to hold out: a Parquet, JSON Lines or Arrow file, or a folder of them.
    Without `val_split` or `val_path`, the hash of each document decides whether it is held out.
    `streaming`: fetch rows over the network each time, and store none. Raises ConfigError without
    the library `datasets`, DataError for missing data or a missing field.
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
        one = (name is None) != (path is None)
        if not one or (path and val_split) or (name and val_path) or val_split == split:
            raise ConfigError(
                "data.name",
                "give data.name=owner/name on the hub (data.val_split: another split, optional), "
                "or data.path=FILE_OR_FOLDER (data.val_path: optional)",
            )
        self.name = name or str(path)
        self._text_field, self._files = text_field, []
        self._streaming = streaming
        side = "train" if val_split or val_path else None  # None: the hash of each row decides
        # Of each part: its side, and its file or the arguments for `datasets`.
        self._parts: list[tuple[str | None, Path | dict[str, Any]]] = []
        if path is not None:
            train, held_out = (
                [file for file in files if file.suffix in SUFFIXES and file.name not in NOTES]
                for files in find_sides(path, val_path, "**/*", "**/*")
            )
            if not train or (val_path and not held_out):
                has = f"{val_path if train else path} has no {', '.join(SUFFIXES)}"
                raise DataError("data.path", f"{has}; for plain text, use data=text")
            self._files = [*train, *held_out]
            self._parts += [("val" if file in held_out else side, file) for file in self._files]
            return
        self._dataset = {"path": name, "name": config, "revision": revision}
        self._parts.append((side, {**self._dataset, "split": split}))
        if val_split:
            self._parts.append(("val", {**self._dataset, "split": val_split}))

    def stamp(self) -> str:
        if self._files:
            state = [stamp_file(file) for file in self._files]
        else:
            with _import_datasets(self.name) as datasets:
                state = datasets.load_dataset_builder(**self._dataset).hash
        return str([self._parts, self._text_field, state])

    def size(self) -> int:
        if any(file.suffix == ".parquet" for file in self._files):  # compressed
            return 0
        return sum(file.stat().st_size for file in self._files)

    def pieces(self, val_fraction: float) -> Iterator[Piece]:
        documents = count()
        for side, part in self._parts:
            for number, row in enumerate(self._read_rows(part), 1):
                text = row.get(self._text_field)
                if not isinstance(text, str):
                    where = part if isinstance(part, Path) else self.name
                    what = f"{where}: row {number} has {text!r:.40} as {self._text_field!r}"
                    raise DataError("data.text_field", f"{what}; its fields: {', '.join(row)}")
                # By its hash, a document is on the same side wherever it appears.
                digest = hashlib.sha256(utf8(text, "data")).hexdigest()
                by_hash = "val" if int(digest[:8], 16) < val_fraction * 2**32 else "train"
                yield Piece(next(documents), side or by_hash, text)

    def _read_rows(self, part: Path | dict[str, Any]) -> Iterator[dict[str, Any]]:
        if isinstance(part, Path) and part.suffix in (".json", ".jsonl"):
            yield from read_json(part)
            return
        for table in self._read_tables(part):
            names = table.schema.names
            # If there is no text, the message lists the other fields.
            found = [name for name in names if name == self._text_field]
            yield from table.select(found or names).to_pylist()

    def _read_tables(self, part: Path | dict[str, Any]) -> Iterator[Any]:
        """Yield the rows as Arrow's tables."""
        if isinstance(part, Path):
            pyarrow = _import_extra("pyarrow", "data", f"a {part.suffix} file")
            with name_errors(DataError, "data.path", str(part), "is it complete?"):
                if part.suffix == ".parquet":
                    parquet = import_module("pyarrow.parquet")
                    yield from parquet.ParquetFile(part).iter_batches(BATCH_ROWS)
                    return
                with pyarrow.memory_map(str(part)) as file:
                    try:
                        yield from pyarrow.ipc.open_stream(file)
                    except pyarrow.ArrowInvalid:  # it is not a stream
                        whole = pyarrow.ipc.open_file(file)
                        yield from map(whole.get_batch, range(whole.num_record_batches))
            return
        with _import_datasets(self.name) as datasets:
            own = {key: value for key, value in part.items() if key != "split"}
            if hasattr(datasets.load_dataset_builder(**own).config, "on_mixed_types"):
                own["on_mixed_types"] = "refuse"  # else it quotes all texts of a JSON file
            rows = datasets.load_dataset(**own, split=part["split"], streaming=self._streaming)
            yield from rows.with_format("arrow").iter(BATCH_ROWS)


def read_json(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON file, in lines or in an array, with their values as they are.

    Raises DataError, naming the row, for one that is not a JSON object.
    """
    with file.open(encoding="utf-8-sig") as lines:
        is_array = lines.read(4096).lstrip().startswith("[")
        lines.seek(0)
        number = 0
        try:
            for row in json.load(lines) if is_array else filter(str.strip, lines):
                number += 1
                found = row if is_array else json.loads(row)
                if not isinstance(found, dict):
                    raise ValueError(f"{found!r:.40} is not an object with fields")
                yield found
        except (ValueError, RecursionError) as error:
            raise DataError("data.path", f"{file}: row {number + (not number)}: {error}") from None


@contextlib.contextmanager
def _import_datasets(where: str) -> Iterator[ModuleType]:
    """Yield the library `datasets`; its errors become a DataError that names `where`."""
    datasets = _import_extra("datasets", "data", "data=hf")
    advice = "check its name, its format, data.config, data.split and the network"
    with name_errors(DataError, "data", where, advice):
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs what it raises
        yield datasets
