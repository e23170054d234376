"""Shows a comparison in TensorBoard: as a run `comparison`, and in the columns of the runs."""

import contextlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from gptattn.compare.comparison import Comparison, Section
from gptattn.compare.curves import Curves, average_rows, choose_curves
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
    from gptattn.compare.plots import Plot

IMAGES = re.compile(r"(\d+_)?(forest_loss|pareto_.*|loss_sizes.*)")  # names of plots
PINNED = ("forest_loss", "pareto_training", "pareto_params")  # of those, on the first page
MAX_COLUMNS = 6  # of a table, beside the variant
SPEEDS = (TRAINING_SPEED, DECODING_SPEED)
# The variant in a run's name, `gqa_s1_0a1b2c` or `comparison/gqa`, and its changed settings.
VARIANT = r"([^/]*?)(?:_s\d+(\+.*)?_\w{6})?$"

Lines = list[tuple[Any, int]]  # TensorBoard's summaries with their steps


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
    from gptattn.runs.events import (
        OF_REPORT,
        find_events,
        lay_out_bands,
        replace_events,
        show_image,
    )

    rows, charts = _draw_bands(comparison, curves)
    shown = [*_write_texts(comparison), lay_out_bands("comparison", charts)]
    shown += [
        show_image(f"comparison/{plot.name}", plot.png)
        for plot in plots
        if IMAGES.fullmatch(plot.name)
    ]
    with disk_errors(out, "out"):
        for file in find_events(out, OF_REPORT):
            file.unlink()
            if file.parent.name not in rows:  # of a row that an earlier report had
                with contextlib.suppress(OSError):  # it holds something else
                    file.parent.rmdir()
        replace_events(out, OF_REPORT, [(summary, 0) for summary in shown])
        for name, line in rows.items():
            replace_events(out / name, OF_REPORT, line)
    _write_columns(comparison)


def _draw_bands(
    comparison: Comparison, curves: Mapping[Path, Curves]
) -> tuple[dict[str, Lines], dict[str, list[str]]]:
    """Return the points of mean, low and high line by row, and the three tags by title of chart."""
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    rows: dict[str, Lines] = {}
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


def _write_texts(comparison: Comparison) -> list[Any]:
    """Return each section's table and words, and the warnings, as Markdown."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    texts = {}
    for section in comparison.sections:
        table = section_table(section)
        group = _group("comparison", section)
        texts[f"{group}table"] = "\n\n".join([*_split(table), table.caption])
        texts[f"{group}words"] = _list_points([*table.words, *table.notes])
    if warnings := warning_lines(comparison):
        texts["comparison/warnings"] = _list_points(warnings)
    return [text_pb(tag, text) for tag, text in texts.items()]


def _group(name: str, section: Section) -> str:
    return f"{name}/{section.title}/" if section.title else f"{name}/"


def _split(table: Table) -> list[str]:
    """Return the table in Markdown, in parts: TensorBoard breaks the words of a wide one.

    Empty columns are left out.
    """
    name, *columns = zip(*table.cells, strict=True)
    known = [column for column in columns if {*column[1:]} != {MISSING}]
    parts = [[name, *known[i : i + MAX_COLUMNS]] for i in range(0, len(known), MAX_COLUMNS)]
    return [Table("", [*zip(*part, strict=True)]).to_markdown() for part in parts]


def _list_points(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line.replace('<', '&lt;')}" for line in lines)


def _write_columns(comparison: Comparison) -> None:
    """Write the columns of the HParams tab, and the speeds that were measured, for each run.

    The tab takes the columns of any one run, so those that are not compared get them, too.
    """
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    from gptattn.runs.events import (
        CACHE_COLUMN,
        OF_RUN,
        PARAMS_COLUMN,
        declare_columns,
        find_events,
        replace_events,
    )

    runs = {run.folder: run for run in comparison.runs}
    known = [run.hyperparameters for run in runs.values()]
    columns = {name: value for name, value in known[0].items() if _varies(name, known)}
    columns |= {"attn": "", CACHE_COLUMN: 0.0, PARAMS_COLUMN: 0.0}
    metrics = [m for m in (ACCURACY, LOSS, *SPEEDS) if any(m in r.metrics for r in runs.values())]
    declared = declare_columns(columns, metrics)
    others = [file.parent for each in comparison.folders for file in find_events(each, OF_RUN)]
    for folder in {*runs, *others}:
        run, lines = runs.get(folder), [(declared, 0)]
        if run is not None:
            speeds = {metric: run.metrics[metric] for metric in SPEEDS if metric in run.metrics}
            lines += [(scalar_pb(tag, value), run.steps) for tag, value in speeds.items()]
        with contextlib.suppress(DiskError):  # a folder of others can be read only
            replace_events(folder, OF_RUN, lines)


def _varies(name: str, known: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether runs differ in a hyperparameter, and not by their attention alone."""
    seen = {(name == "attn_settings" and one.get("attn"), one.get(name)) for one in known}
    return len(seen) > len({attn for attn, _ in seen})


def _folder_name(name: str) -> str:
    """Return `name` as a valid folder name; a setting's value may contain slashes."""
    return re.sub(r"[^\w.,=+()\- ]", "_", name)[:200].strip(" .") or "_"
