"""Reads the rows of metrics.jsonl."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gptattn.runs.folder import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame


def read_rows(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the rows in order.

    A last line without a newline is either a complete row or a truncated one. Raises OSError, and
    ValueError at the first line that is no row.
    """
    with folder.rows_file.open("rb") as lines:
        for count, line in enumerate(filter(bytes.strip, lines)):
            try:
                row = json.loads(line)
                yield {**row, "step": float(row["step"])}
            except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
                raise ValueError(
                    f"metrics.jsonl is damaged after {count:,} rows; those count"
                ) from None


def read_metrics(folder: RunFolder) -> "DataFrame":
    """Return a pandas DataFrame with one row per metric and step: `step`, `metric`, `value`.

    All numbers of metrics.jsonl in their order; of a step repeated after a resume, the last counts.
    Raises as `read_rows`.
    """
    from pandas import DataFrame  # slow to import, and training does not need it

    long = [
        (int(row["step"]), metric, float(value))
        for row in read_rows(folder)
        for metric, value in row.items()
        if metric not in ("step", "time") and isinstance(value, int | float)
    ]
    table = DataFrame(long, columns=["step", "metric", "value"])
    return table.drop_duplicates(["step", "metric"], keep="last", ignore_index=True)
