"""Writes every file of the report from one comparison."""

from dataclasses import replace
from pathlib import Path

from gptattn.compare.curves import read_curves
from gptattn.compare.files import csv_text, disk_errors, json_text, remove_former_board, write
from gptattn.compare.results import Comparison
from gptattn.compare.watch import Following

PLOTS = (
    "ladder_compute",
    "ladder_cache",
    "ladder_seconds",
    "loss_sizes",
    "loss_tokens",
    "loss_flops",
    "loss_seconds",
    "pareto_params",
    "pareto_cache",
    "pareto_flops",
    "pareto_speed",
    "loss_position",
    "loss_position_beyond",
    "loss_cache",
)


def write_report(comparison: Comparison, out: Path, following: Following | None = None) -> Path:
    """Write or replace comparison.{csv,json,html} and the plots; return the page's path.

    The folder must exist. `following` is what the page says of a sweep that is watched. Raises
    DiskError if a file cannot be written.
    """
    from gptattn.compare.plots import ladder_plots, section_plots, size_plots
    from gptattn.compare.report_page import page_text
    from gptattn.compare.svg import standalone

    plots = [
        section_plots(section, comparison.curves, _prefix(i, comparison))
        for i, section in enumerate(comparison.sections)
    ]
    across = [*ladder_plots(comparison.ladders), *size_plots(comparison.sections)]
    drawn = [plot for group in (across, *plots) for plot in group]
    with disk_errors(out):
        for plot in drawn:
            write(out / f"{plot.name}.svg", standalone(plot.svg))
            write(out / f"{plot.name}.png", plot.png)
        write(out / "comparison.csv", csv_text(comparison))
        write(out / "comparison.json", json_text(comparison))
        write(out / "comparison.html", page_text(comparison, plots, across, following))
        _remove_others(out, {plot.name for plot in drawn})
        # Earlier versions put the board here, where TensorBoard lists it among the runs.
        remove_former_board(out / "tensorboard")
    return out / "comparison.html"


def with_curves(comparison: Comparison) -> Comparison:
    """Return the comparison with each run's curves, and a warning per damaged metrics.jsonl."""
    curves, warnings = {}, list(comparison.warnings)
    for run in {run.folder: run for run in comparison.runs}.values():
        curves[run.folder], damage = read_curves(run.folder)
        if damage:
            warnings.append(damage)
    return replace(comparison, curves=curves, warnings=warnings)


def _prefix(index: int, comparison: Comparison) -> str:
    """Return "" for the only section; otherwise `1_`, `2_`, in the order of the page."""
    return "" if len(comparison.sections) == 1 else f"{index + 1}_"


def _remove_others(out: Path, names: set[str]) -> None:
    """Remove the plots of an earlier report that this one does not have."""
    for plot in PLOTS:
        for pattern in (f"{plot}.*", f"[0-9]*_{plot}.*"):
            for file in out.glob(pattern):
                if file.suffix in (".svg", ".png") and file.stem not in names:
                    file.unlink()
