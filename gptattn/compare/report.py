"""Writes a report: a self-contained page, a CSV of its figures, and the plots."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gptattn.compare import verdicts
from gptattn.compare.board import describe_board, write_board
from gptattn.compare.comparison import COSTS, Comparison
from gptattn.compare.curves import Curves, read_curves
from gptattn.compare.differences import count_values, environments
from gptattn.compare.finished_runs import one_line
from gptattn.compare.table import (
    Table,
    evaluation_tables,
    print_tables,
    section_table,
    warning_lines,
)
from gptattn.machine.console import make_console
from gptattn.machine.disk import claim_folder, write_atomically
from gptattn.machine.template import fill_template
from gptattn.runs.folder import RunFolder
from gptattn.runs.metrics import LOSS
from gptattn.runs.planned_runs import PLANNED, read_planned

if TYPE_CHECKING:
    from gptattn.compare.plots import Plot

# Files that a report writes and may remove.
OF_LOSS = r"tokens|flops|seconds|sizes|sizes_cache|cache|position(_\d+)?(_beyond)?"
ONE = "forest_loss|accuracy_length"
OLD_PLOTS = re.compile(rf"(\d+_)?({ONE}|loss_({OF_LOSS})|pareto_({'|'.join(COSTS)}))\.(svg|png)")
FILES = ("comparison.*", "track.*", "battery*.*")
FILES += ("*forest_loss.*", "*loss_*.*", "*accuracy_*.*", "*pareto_*.*")


def publish(comparison: Comparison, out: Path | None, still_open: Sequence[str] = ()) -> None:
    """Print the tables and warnings, write the report to `out`, and print how to open it.

    Raises DiskError if a file cannot be written.
    """
    curves: Mapping[Path, Curves] = {}
    if out is not None:
        claim_folder(out, "report", "out", *FILES)
        results = {run.folder: read_curves(run.folder) for run in comparison.runs}
        curves = {folder: of_run for folder, (of_run, _) in results.items()}
        damage = [line for _, line in results.values() if line]
        comparison = replace(comparison, warnings=[*comparison.warnings, *damage])
    print_tables(comparison, make_console())
    for line in warning_lines(comparison):
        print(f"warning: {line}", file=sys.stderr)
    if out is not None:
        print(f"page: {write_report(comparison, curves, out, still_open)}")
        print(f"curves: {describe_board(out, comparison)}")


def write_report(
    comparison: Comparison, curves: Mapping[Path, Curves], out: Path, still_open: Sequence[str] = ()
) -> Path:
    """Write or replace comparison.{csv,html}, the plots and the board; return the page's path.

    The folder must exist. `still_open` describes unfinished sweeps. The page escapes all text from
    run folders. Raises DiskError if a file cannot be written.
    """
    from gptattn.compare.plots import draw_plots

    across, of_sections = draw_plots(comparison, curves)
    plots = [*across, *(plot for group in of_sections for plot in group)]
    sections = [
        {
            "section": section,
            "table": section_table(section),
            "forest": [plot for plot in own if "forest" in plot.name],
            "plots": [plot for plot in own if "forest" not in plot.name],
            "settings": sorted(set.intersection(*({*run.settings.items()} for run in runs))),
            "evaluations": evaluation_tables(section),
        }
        for section, own in zip(comparison.sections, of_sections, strict=True)
        for runs in [[run for row in section.rows for run in row.runs]]
    ]
    page = fill_template(
        "gptattn.compare",
        "page.html.j2",
        comparison=comparison,
        LOSS=LOSS,
        headline=verdicts.headline(comparison),
        sections=sections,
        across=across,
        axes=", ".join(comparison.sections[0].title_parts),
        environment=[
            (name, values[0] if len({*values}) == 1 else count_values(values))
            for name, values in environments(comparison.runs)
        ],
        still_open=still_open,
    )
    _write_plots(plots, out)
    _write(out / "comparison.csv", comparison.table().to_csv(index=False, lineterminator="\n"))
    _write(out / "comparison.html", page)
    names = {plot.name for plot in plots}
    for file in out.iterdir():  # plots of an earlier report that this one lacks
        if OLD_PLOTS.fullmatch(file.name) and file.stem not in names:
            file.unlink()
    write_board(comparison, curves, plots, out)
    return out / "comparison.html"


def write_with_plots(table: Table, plots: Sequence["Plot"], out: Path) -> Path:
    """Write the plots, the table as CSV, and a page of both; return its path. Raises DiskError."""
    name = plots[0].name
    _write(out / f"{name}.csv", table.to_csv())
    _write_plots(plots, out)
    page = fill_template("gptattn.compare", "shipped.html.j2", shipped=table, plots=plots)
    _write(out / f"{name}.html", page)
    return out / f"{name}.html"


def _write_plots(plots: Sequence["Plot"], out: Path) -> None:
    for plot in plots:
        _write(out / f"{plot.name}.svg", _standalone(plot.svg))
        _write(out / f"{plot.name}.png", plot.png)


def _write(file: Path, content: str | bytes) -> None:
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    write_atomically(file, lambda target: target.write(data))


def _standalone(svg: str) -> str:
    """Return a standalone SVG file, with text colours for light and dark mode."""
    style = "svg{color:#1b1c1d}@media(prefers-color-scheme:dark){svg{color:#e4e4e7}}"
    end = svg.index(">") + 1
    head = '<?xml version="1.0" encoding="utf-8"?>'
    return f"{head}\n{svg[:end]}<style>{style}</style>{svg[end:]}\n"


def describe_open_sweeps(folders: Sequence[Path]) -> list[str]:
    """Return a line per unfinished sweep in the folders: `outputs/a: 5 of 9 runs are done`.

    The comparison lists failed runs, with their reasons, among those it skips.
    """
    sweeps = [each for each in folders if (each / PLANNED).is_file()]
    sweeps += [file.parent for each in folders for file in sorted(each.glob(f"*/{PLANNED}"))]
    lines = []
    for sweep in dict.fromkeys(sweeps):
        done = [RunFolder(sweep / name).done for name in read_planned(sweep)]
        if not all(done):
            lines.append(one_line(f"{sweep}: {sum(done)} of {len(done)} runs are done"))
    return lines
