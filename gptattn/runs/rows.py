"""Reads the rows of metrics.jsonl, and drops those after the checkpoint of a resumed run."""

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gptattn.machine.disk import write_atomically
from gptattn.runs.folder import RunFolder
from gptattn.runs.metrics import BITS, LOSS, TRAIN_LOSS

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")


class Row(msgspec.Struct, gc=False):
    """The values of a row that are plotted as curves; None for missing values."""

    step: float | None = None
    time: float | None = None  # seconds since 1970
    train: float | None = msgspec.field(name=TRAIN_LOSS, default=None)
    val: float | None = msgspec.field(name=LOSS, default=None)
    bits: float | None = msgspec.field(name=BITS, default=None)
    tokens: float | None = msgspec.field(name="progress/tokens", default=None)
    seconds: float | None = msgspec.field(name="progress/seconds", default=None)
    flops: float | None = msgspec.field(name="progress/flops", default=None)


def read_rows(folder: RunFolder) -> Iterator[Row]:
    """Yield the rows in order, with the values that are plotted.

    Raises OSError, and ValueError at the first line that is no row.
    """
    yield from _read_rows(folder, Row)


def read_metrics(folder: RunFolder) -> "DataFrame":
    """Return a pandas DataFrame with one row per metric and step: `step`, `metric`, `value`.

    All numbers of metrics.jsonl in their order; of a step repeated after a resume, the last counts.
    Raises OSError, and ValueError at the first line that is no row.
    """
    from pandas import DataFrame  # slow to import, and training does not need it

    long = [
        (int(row["step"]), metric, float(value))
        for row in _read_rows(folder, dict[str, Any])
        for metric, value in row.items()
        if metric not in ("step", "time") and isinstance(value, int | float)
    ]
    table = DataFrame(long, columns=["step", "metric", "value"])
    return table.drop_duplicates(["step", "metric"], keep="last", ignore_index=True)


def _read_rows(folder: RunFolder, kind: type[T]) -> Iterator[T]:
    """Yield the rows as this kind.

    A last line without a newline is either a complete row or a truncated one.
    """
    decoder = msgspec.json.Decoder(kind)
    with folder.rows_file.open("rb") as lines:
        for count, line in enumerate(filter(bytes.strip, lines)):
            try:
                try:
                    row = decoder.decode(line)
                except msgspec.DecodeError:  # of NaN, which Python's json writes and reads
                    row = msgspec.convert(json.loads(line), kind)
            except (ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
                raise ValueError(
                    f"metrics.jsonl is damaged after {count:,} rows; those count"
                ) from None
            yield row


def keep_rows(folder: RunFolder, count: int, step: int) -> int:
    """Keep the first `count` rows of metrics.jsonl, those written up to `step`; drop the others.

    Returns the number of rows kept, less than `count` if some were lost: rows written after `step`
    never replace them.
    """
    file = folder.rows_file
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    kept = [line for line in lines[:count] if line.endswith(b"\n") and _read_step(line) <= step]
    if len(kept) < len(lines):
        write_atomically(file, lambda target: target.writelines(kept))
    return len(kept)


def _read_step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return math.inf  # not a valid row
