"""Reads the rows of metrics.jsonl."""

import json
from typing import TYPE_CHECKING, Any

from gptattn.errors import DAMAGE
from gptattn.runs.folder import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame


def read_metrics(folder: RunFolder) -> tuple["DataFrame", str | None]:
    """Return the numbers of metrics.jsonl, and what is wrong with the file, if anything is.

    A pandas DataFrame with one row per metric and step, in their order: `step`, `metric`, `value`.
    If a resumed run repeated a step, the last value counts. Rows before a damaged one are kept. A
    last line without a newline counts if its row is complete.
    """
    from pandas import DataFrame  # slow to import, and training does not need it

    long: list[tuple[int, str, float]] = []
    damage, count = None, 0
    try:
        with folder.rows_file.open("rb") as lines:
            for line in filter(bytes.strip, lines):
                row = json.loads(line)
                step = int(row["step"])
                long += [
                    (step, metric, float(value))
                    for metric, value in row.items()
                    if metric not in ("step", "time") and isinstance(value, int | float)
                ]
                count += 1
    except FileNotFoundError:
        damage = "has no metrics.jsonl, so no curves"
    except OSError as error:
        damage = f"metrics.jsonl: {error.strerror}, so no curves"
    except DAMAGE:
        damage = f"metrics.jsonl is damaged after {count:,} rows; only these are used"
    types: dict[str, Any] = {"step": "int64", "metric": str, "value": "float64"}
    table = DataFrame(long, columns=[*types]).astype(types)
    return table.drop_duplicates(["step", "metric"], keep="last", ignore_index=True), damage
