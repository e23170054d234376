"""Shows a comparison in TensorBoard: as a run `comparison`, and in the columns of the runs."""

import contextlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from gptattn.compare.comparison import Comparison, Section
from gptattn.compare.curves import Curves, average_rows, choose_curves
from gptattn.compare.finished_runs import Run
from gptattn.compare.table import MISSING, Table, section_table, warning_lines
from gptattn.errors import DiskError
from gptattn.machine.disk import disk_errors
from gptattn.runs.metrics import (
    ACCURACY,
    DECODING_SPEED,
    LOSS,
    SPEED,
    TRAIN_LOSS,
    TRAINING_SPEED,
)

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

    from gptattn.compare.plots import Plot

IMAGES = re.compile(r"(\d+_)?(forest_loss|pareto_.*|loss_sizes.*)")  # names of plots
PINNED = ("forest_loss", "pareto_training", "pareto_params")  # of those, on the first page
SPEEDS = (TRAINING_SPEED, DECODING_SPEED)
# The variant in a run's name, `gqa_s1_0a1b2c` or `comparison/gqa`, and its changed settings.
VARIANT = r"([^/]*?)(?:_s\d+(\+.*)?_\w{6})?$"


def describe_board(folder: Path) -> str:
    """Return the command that shows the folder in TensorBoard, and the address to open.

    There the answers are pinned, lines are not smoothed, and the runs of a variant have one colour.
    Cards that do not exist are not shown.
    """
    run = {"runId": "defaultExperimentId/comparison", "sample": 0}
    cards = [
        *({"plugin": "images", "tag": f"comparison/{plot}", **run} for plot in PINNED),
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
    """Write the comparison as a TensorBoard run, with a run for each row below it.

    It takes the place of what an earlier report wrote. A file in the folder of each compared run,
    where it can be written, declares the columns of the HParams tab and has the measured speeds.
    Raises DiskError if a file in `out` cannot be written.
    """
    from gptattn.runs.events import OF_REPORT, list_events, replace_events

    rows, charts = _draw_bands(comparison, curves)
    shown = [*_write_texts(comparison), *_show_plots(plots), _lay_out(charts)]
    with disk_errors(out, "out"):
        for file in [file for below in out.iterdir() for file in list_events(below, OF_REPORT)]:
            file.unlink()
            if file.parent.name not in rows:  # of a row that an earlier report had
                with contextlib.suppress(OSError):  # it holds something else
                    file.parent.rmdir()
        replace_events(out, OF_REPORT, [(summary, 0) for summary in shown])
        for name, line in rows.items():
            replace_events(out / name, OF_REPORT, line)
    _write_columns(comparison.runs)


def _draw_bands(
    comparison: Comparison, curves: Mapping[Path, Curves]
) -> tuple[dict[str, list[tuple["Summary", int]]], dict[str, list[str]]]:
    """Return the points of mean, low and high line by row, and the three tags by title of chart."""
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    rows: dict[str, list[tuple[Summary, int]]] = {}
    charts = {}
    for section in comparison.sections:
        kind = choose_curves(section, curves)
        loss = {"val": LOSS, "train": TRAIN_LOSS}[kind]
        tag = _group("by_variant", section) + loss.replace("/", "_")
        tags = [tag, f"{tag}_low", f"{tag}_high"]
        of_section = f", {section.title}" if section.title else ""
        charts[f"{loss} by variant (mean and band){of_section}"] = tags
        for row, band in average_rows(section, curves, kind, "step").items():
            low, high = band.low, band.high
            if low is None or high is None:
                low, high = band.seeds.min(axis=0), band.seeds.max(axis=0)  # the few seeds
            rows.setdefault(_folder_name(row), []).extend(
                (scalar_pb(tag, value), round(step))
                for tag, line in zip(tags, (band.mean, low, high), strict=True)
                for step, value in zip(band.x, line, strict=True)
            )
    return rows, charts


def _write_texts(comparison: Comparison) -> list["Summary"]:
    """Return each section's table and words, and the warnings, as Markdown."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    texts = {}
    for section in comparison.sections:
        table = section_table(section)
        of_loss, of_costs = _halve(table)
        group = _group("comparison", section)
        texts[f"{group}table"] = f"{of_loss}\n\n{table.caption}\n\n{of_costs}"
        texts[f"{group}words"] = _list_points([*table.words, *table.notes])
    if warnings := warning_lines(comparison):
        texts["comparison/warnings"] = _list_points(warnings)
    return [text_pb(tag, text) for tag, text in texts.items()]


def _group(name: str, section: Section) -> str:
    return f"{name}/{section.title}/" if section.title else f"{name}/"


def _halve(table: Table) -> tuple[str, str]:
    """Return the table up to p, and what follows, as Markdown: TensorBoard breaks wide tables.

    Empty columns are left out.
    """
    name, *others = zip(*table.cells, strict=True)
    end = [heading for heading, *_ in others].index("p") + 1
    halves = (
        [name, *(column for column in half if {*column[1:]} != {MISSING})]
        for half in (others[:end], others[end:])
    )
    first, second = (Table("", [*zip(*half, strict=True)]).to_markdown() for half in halves)
    return first, second


def _list_points(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line.replace('<', '&lt;')}" for line in lines)


def _show_plots(plots: Sequence["Plot"]) -> list["Summary"]:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return [
        Summary(
            value=[
                Summary.Value(
                    tag=f"comparison/{plot.name}",
                    image=Summary.Image(encoded_image_string=plot.png),
                )
            ]
        )
        for plot in plots
        if IMAGES.fullmatch(plot.name)
    ]


def _lay_out(charts: Mapping[str, Sequence[str]]) -> "Summary":
    """Return the layout of the Custom Scalars tab: a mean with its band for each tag triple."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import metadata
    from tensorboard.plugins.custom_scalar.layout_pb2 import (
        Category,
        Chart,
        Layout,
        MarginChartContent,
    )
    from tensorboard.util.tensor_util import make_tensor_proto

    drawn = []
    for title, (mean, low, high) in charts.items():
        series = MarginChartContent.Series(value=mean, lower=low, upper=high)
        drawn.append(Chart(title=title, margin=MarginChartContent(series=[series])))
    layout = Layout(category=[Category(title="comparison", chart=drawn)])
    return Summary(
        value=[
            Summary.Value(
                tag=metadata.CONFIG_SUMMARY_TAG,
                metadata=metadata.create_summary_metadata(),
                tensor=make_tensor_proto(layout.SerializeToString()),
            )
        ]
    )


def _write_columns(runs: Sequence[Run]) -> None:
    """Write the columns of the HParams tab, and the speeds that were measured, for each run.

    The tab takes the columns of any one run, so all have the same: the settings that vary.
    """
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    from gptattn.runs.events import (
        CACHE_COLUMN,
        OF_RUN,
        PARAMS_COLUMN,
        declare_columns,
        replace_events,
    )

    first = runs[0].hyperparameters
    columns = {name: value for name, value in first.items() if _varies(name, runs)}
    columns |= {"attn": "", CACHE_COLUMN: 0.0, PARAMS_COLUMN: 0.0}
    metrics = [m for m in (ACCURACY, LOSS, *SPEEDS) if any(m in run.metrics for run in runs)]
    declared = declare_columns(columns, metrics)
    for run in runs:
        speeds = [(scalar_pb(m, run.metrics[m]), run.steps) for m in SPEEDS if m in run.metrics]
        with contextlib.suppress(DiskError):  # a folder of others can be read only
            replace_events(run.folder, OF_RUN, [(declared, 0), *speeds])


def _varies(name: str, runs: Sequence[Run]) -> bool:
    """Return whether runs differ in a hyperparameter, and not by their attention alone."""
    by = "attn" if name == "attn_settings" else None
    seen = {(run.hyperparameters.get(by), run.hyperparameters.get(name)) for run in runs}
    return len(seen) > len({known for known, _ in seen})


def _folder_name(name: str) -> str:
    """Return `name` as a valid folder name; a setting's value may contain slashes."""
    return re.sub(r"[^\w.,=+()\- ]", "_", name)[:200].strip(" .") or "_"
