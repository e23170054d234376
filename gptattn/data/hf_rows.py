"""Rows with a text each: `data=hf`, of the Hugging Face hub or of files on this machine."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptattn.data.prepare import PART_BYTES, PartedText
from gptattn.data.segments import (
    HubRows,
    Segment,
    arrow_segments,
    grouped,
    json_segments,
    parquet_segments,
)
from gptattn.data.text import expanded, is_hidden
from gptattn.errors import ConfigError, DataError
from gptattn.machine.disk import REFUSALS

NOTES = {"dataset_info.json", "dataset_dict.json", "state.json"}  # beside what `datasets` saves
SUFFIXES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".arrow": "arrow"}


def rows(
    name: str | None,
    config: str | None = None,
    split: str = "train",
    val_split: str | None = None,
    text_field: str = "text",
    streaming: bool = False,
    revision: str | None = None,
    path: str | None = None,
    val_path: str | None = None,
    val_fraction: float = 0.1,
) -> PartedText:
    """Return the rows of a data set on the hub, or of local files; each row is a document.

    `path`, and `val_path` to hold out: a Parquet, JSON Lines or Arrow file, or a folder of them.
    Without `val_split` or `val_path`, the hash of each document decides whether it is held out.
    `streaming`: rows come over the network each time, none is kept. Raises ConfigError without the
    library `datasets`, DataError for what is missing or has no such field.
    """
    if (name is None) == (path is None):
        raise ConfigError(
            "data.name", "give data.name=owner/name of the hub, or data.path=FILE_OR_FOLDER"
        )
    if path is not None:
        if val_split:
            raise ConfigError("data.val_split", "is of data.name; give data.val_path=FILE")
        segments = _local(path, val_path, text_field)
        return PartedText(grouped(segments, PART_BYTES), val_fraction, path)
    assert name is not None
    if val_path:
        raise ConfigError("data.val_path", "is of data.path; give data.val_split=NAME")
    if val_split == split:
        raise ConfigError("data.val_split", f"{split} is trained on; give another split")
    side = "train" if val_split else None
    where = (name, config, revision)
    segments = _hub(*where, split, side, text_field, streaming)
    segments += _hub(*where, val_split, "val", text_field, streaming) if val_split else []
    return PartedText(grouped(segments, PART_BYTES), val_fraction, name)


def _local(path: str, val_path: str | None, text_field: str) -> list[Segment]:
    held_out = _files(val_path, "data.val_path") if val_path else []
    apart = {file.resolve() for file in held_out}
    files = [file for file in _files(path, "data.path") if file.resolve() not in apart]
    if not files:
        raise DataError(
            "data.val_path", f"{val_path} holds out all of data.path; give a part of it"
        )
    sides = [*((file, "train" if val_path else None) for file in files)]
    sides += ((file, "val") for file in held_out)
    return [segment for file, side in sides for segment in _of_file(file, side, text_field)]


def _files(path: str, field: str) -> list[Path]:
    """Return the files at or below the path, without hidden ones."""
    root = expanded(path, field)
    if not root.exists():
        raise DataError(field, f"{root} does not exist; give a file or a folder")
    files = [root]
    if root.is_dir():
        files = [file for file in sorted(root.rglob("*")) if not is_hidden(file, root)]
    files = [f for f in files if f.suffix in SUFFIXES and f.name not in NOTES and f.is_file()]
    if not files:
        raise DataError(
            field, f"{root} has no {', '.join(SUFFIXES)}; for plain text, use data=text"
        )
    return files


def _of_file(file: Path, side: str | None, text_field: str) -> Sequence[Segment]:
    kind = SUFFIXES[file.suffix]
    if kind == "json":
        return json_segments(file, PART_BYTES, side, text_field)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise _lacking() from None
    if kind == "parquet":
        return parquet_segments(file, side, text_field)
    return arrow_segments(file, PART_BYTES, side, text_field)


def _lacking() -> ConfigError:
    return ConfigError("data", "hf needs the extra hf: pip install 'gptattn[hf]'")


def _hub(
    name: str,
    config: str | None,
    revision: str | None,
    split: str,
    side: str | None,
    text_field: str,
    streaming: bool,
) -> list[Segment]:
    try:
        import datasets
    except ImportError:
        raise _lacking() from None
    try:
        loaded: Any = datasets.load_dataset(
            name, config, split=split, revision=revision, streaming=streaming
        )
        state = _state(name, revision) if streaming else ""
    # The library raises its own errors and those of its transport libraries.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in REFUSALS:
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            "data.name",
            f"{name} cannot be loaded ({first}); check data.name, data.config, data.split and the "
            "network",
        ) from None
    names = loaded.column_names
    if names is not None and text_field not in names:
        raise DataError(
            "data.text_field", f"{name} has no field {text_field!r}, only {', '.join(names)}"
        )
    cut = _streamed if streaming else _held
    return list(cut(loaded, name, f"{name} {config} {split} {state}", side, text_field))


def _held(
    loaded: Any, name: str, told: str, side: str | None, text_field: str
) -> Iterator[Segment]:
    """Yield rows that are on the disk, in segments of about PART_BYTES."""
    column = loaded.select_columns(text_field)
    size = int(column.data.nbytes)
    count = min(max(1, round(size / PART_BYTES)), max(1, len(column)))
    files = sorted(file["filename"] for file in loaded.cache_files)  # named after their content
    for i in range(count):
        part = column.shard(count, i, contiguous=True)
        which = f"{told} {files} {i}/{count}"
        yield HubRows(part, name, which, side, text_field, size // count)


def _streamed(
    loaded: Any, name: str, told: str, side: str | None, text_field: str
) -> Iterator[Segment]:
    """Yield rows that come over the network, in as many segments as there are files."""
    size, count = loaded.info.dataset_size or 0, loaded.num_shards
    for i in range(count):
        part = loaded.shard(count, i).select_columns(text_field)
        yield HubRows(part, name, f"{told} {i}/{count}", side, text_field, size // count)


def _state(name: str, revision: str | None) -> str:
    """Return what changes when a data set does: the commit on the hub, or a folder's files."""
    folder = Path(name)
    if folder.is_dir():
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return str([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(name, revision=revision).sha)
