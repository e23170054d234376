"""Shows a comparison in TensorBoard: as a run named `comparison` and in the runs' columns."""
# pyright: reportAttributeAccessIssue=false
# Protobuf creates its classes at import.

import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from gptattn.compare.comparison import Comparison
from gptattn.compare.curves import Curves, average_rows, choose_curves
from gptattn.compare.table import Table, section_table
from gptattn.errors import DiskError
from gptattn.runs.folder import RunFolder
from gptattn.runs.metrics import (
    ACCURACY,
    DECODING_SPEED,
    FIRST_COLUMNS,
    LOSS,
    SPEED,
    TRAIN_LOSS,
    TRAINING_SPEED,
)

if TYPE_CHECKING:
    from gptattn.compare.plots import Plot

PINNED = ("forest_loss", "pareto_training", "pareto_params")  # plots on the first page
SPEEDS = (TRAINING_SPEED, DECODING_SPEED)
# The variant in a run's name, `gqa_s1_0a1b2c` or `comparison/gqa`, and its changed settings.
VARIANT = r"([^/]*?)(?:_s\d+(\+.*)?_\w{6})?$"
MAX_NAME = 200  # characters of a folder's name, which file systems limit
MAX_COLUMNS = 6  # of a table, plus the names: TensorBoard breaks words in wider ones


def describe_board(out: Path, comparison: Comparison) -> str:
    """Return the command that shows a report in TensorBoard, and the address to open.

    The address pins the main plots, turns smoothing off, and colours runs by variant.
    """
    folder, name = (out.parent, out.name) if out.name == "comparison" else (out, ".")
    run = {"runId": f"defaultExperimentId/{name}", "sample": 0}
    first = "1_" if len(comparison.sections) > 1 else ""  # prefix of the first section's plots
    cards = [
        *({"plugin": "images", "tag": f"comparison/{first}{plot}", **run} for plot in PINNED),
        *({"plugin": "scalars", "tag": tag} for tag in (LOSS, SPEED)),
    ]
    query = {
        "pinnedCards": json.dumps(cards, separators=(",", ":")),
        "smoothing": "0",
        "runColorGroup": f"regex:{VARIANT}",
    }
    address = f"http://localhost:6006/?{urlencode(query, safe=':,/', quote_via=quote)}#timeseries"
    return f"tensorboard --logdir {shlex.quote(str(folder))}\n{address}"


def write_board(
    comparison: Comparison, curves: Mapping[Path, Curves], plots: Sequence["Plot"], out: Path
) -> None:
    """Write or replace the comparison as a TensorBoard run, with a subfolder run per row.

    Raises OSError or DiskError if a file in `out` cannot be written.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.util.tensor_util import make_tensor_proto

    from gptattn.runs.events import EVENTS, write_events

    shown: list[Any] = []
    charts: list[Any] = []
    rows: dict[str, list[tuple[Any, int]]] = {}
    for section in comparison.sections:
        table, group = section_table(section), f"{section.title}/" if section.title else ""
        words = [*table.words, *table.notes, *section.warnings, *comparison.warnings]
        shown.append(text_pb(f"comparison/{group}table", _split(table)))
        shown.append(text_pb(f"comparison/{group}words", "- " + "\n- ".join(words)))

        kind = choose_curves(section, curves)
        loss = {"val": LOSS, "train": TRAIN_LOSS}[kind]
        tag = f"by_variant/{group}{loss.replace('/', '_')}"
        series = {"value": tag, "lower": f"{tag}_low", "upper": f"{tag}_high"}
        title = f"{loss} by variant (mean and band)" + f", {section.title}" * bool(group)
        charts.append(layout_pb2.Chart(title=title, margin={"series": [series]}))
        for row, band in average_rows(section, curves, kind, "step").items():
            folder = row.replace("/", "_").strip(" .")[:MAX_NAME] or "_"
            rows.setdefault(folder, []).extend(
                (scalar_pb(name, value), round(step))
                for name, line in zip(
                    series.values(), (band.mean, band.low, band.high), strict=True
                )
                for step, value in zip(band.x, line, strict=True)
            )
    for plot in plots:
        image = {"encoded_image_string": plot.png}
        shown.append(Summary(value=[{"tag": f"comparison/{plot.name}", "image": image}]))
    layout = layout_pb2.Layout(category=[{"title": "comparison", "chart": charts}])
    tensor = make_tensor_proto(layout.SerializeToString())
    described = {"metadata": metadata.create_summary_metadata(), "tensor": tensor}
    shown.append(Summary(value=[{"tag": metadata.CONFIG_SUMMARY_TAG, **described}]))

    for old in out.glob(f"*/{EVENTS}"):
        if not RunFolder(old.parent).begun:
            old.unlink()
    write_events(out, ((summary, 0) for summary in shown))
    for name, points in rows.items():
        write_events(out / name, points)
    _write_columns(comparison)


def _split(table: Table) -> str:
    """Return the table and its caption as Markdown, split into parts of MAX_COLUMNS."""
    name, *columns = zip(*table.cells, strict=True)
    starts = range(0, len(columns), MAX_COLUMNS)
    parts = [[name, *columns[start : start + MAX_COLUMNS]] for start in starts]
    shown = [Table("", [*zip(*part, strict=True)]).to_markdown() for part in parts]
    return "\n\n".join([*shown, table.caption])


def _write_columns(comparison: Comparison) -> None:
    """Write the HParams tab's columns and the measured speeds for each run.

    All runs in the folders get the same columns. A folder that cannot be written stays as it is.
    """
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    from gptattn.runs.events import EVENTS, declare_columns, write_events

    runs = {run.folder: run for run in comparison.runs}
    hyperparameters = [run.hyperparameters for run in runs.values()]

    def count(*names: str) -> int:
        return len({tuple(str(one.get(name)) for name in names) for one in hyperparameters})

    names = [name for name in hyperparameters[0] if name in FIRST_COLUMNS or count(name) > 1]
    if count("attn", "attn_settings") == count("attn"):
        names = [name for name in names if name != "attn_settings"]
    metrics = [m for m in (ACCURACY, LOSS, *SPEEDS) if any(m in r.metrics for r in runs.values())]
    columns = declare_columns(names, metrics)
    found = {file.parent for each in comparison.folders for file in Path(each).rglob(EVENTS)}
    for folder in {*runs, *(place for place in found if RunFolder(place).begun)}:
        speeds = {} if folder not in runs else runs[folder].metrics
        lines = [(scalar_pb(m, speeds[m]), runs[folder].steps) for m in SPEEDS if m in speeds]
        with contextlib.suppress(DiskError):
            write_events(folder, [(columns, 0), *lines])
