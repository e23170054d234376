"""Makes the report page: one self-contained HTML file; all text from run folders is escaped."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

from markupsafe import Markup

from gptattn.compare.chart import packed
from gptattn.compare.evaluation_tables import evaluation_tables
from gptattn.compare.plot_style import Plot
from gptattn.compare.results import Comparison, Section
from gptattn.compare.sections import axes_of, differences
from gptattn.compare.setting_words import counted
from gptattn.compare.table import report_rows
from gptattn.compare.verdicts import headline, match_words, section_words, sure_words
from gptattn.compare.watch import Following
from gptattn.compare.wholes import wholes
from gptattn.machine.template import fill_template


def page_text(
    comparison: Comparison,
    plots: Sequence[Sequence[Plot]],
    across: Sequence[Plot],
    following: Following | None = None,
) -> str:
    """Return the page's HTML.

    `plots` holds the plots of each section, in the sections' order; `across`, those that span
    several sections. `following` says what is still open while the runs are watched.
    """
    figures = [_figures(group) for group in (across, *plots)]
    charts = [chart for group in figures for figure in group if (chart := figure["chart"])]
    refresh = following is not None and following.seconds is not None
    scripts = [_vendored()] * bool(charts) + [_text("page.js")] * bool(charts or refresh)
    return fill_template(
        "gptattn.compare",
        "page.html.j2",
        comparison=comparison,
        headline=headline(comparison),
        sections=[
            _section(section, group)
            for section, group in zip(comparison.sections, figures[1:], strict=True)
        ],
        wholes=wholes(comparison),
        across=figures[0],
        must_split=differences(comparison.runs),
        axes=", ".join(axes_of(comparison.runs)),
        environment=_environment(comparison),
        following=following,
        charts=charts,
        styles=Markup(_text("vendor/uPlot.min.css")) if charts else "",
        scripts=[Markup(script) for script in scripts],
        hashes=[_digest(script) for script in scripts],
    )


def _section(section: Section, figures: list[dict[str, Any]]) -> dict[str, Any]:
    heading, *body = report_rows(section)
    fronts = {row.name: row.fronts for row in section.rows}
    return {
        "title": section.title,
        "baseline": section.baseline,
        "words": section_words(section),
        "match": [*match_words(section), *sure_words(section)],
        "warnings": section.warnings,
        "heading": [*heading, "Pareto front"],
        "body": [[*row, ", ".join(fronts.get(row[0], []))] for row in body],
        "figures": figures,
        "evaluations": evaluation_tables(section),
        "rows": section.rows,
    }


def _figures(plots: Sequence[Plot]) -> list[dict[str, Any]]:
    """Return the plots with their SVG; neighbours that are choices of one chart are one figure."""
    found = []
    for title, group in groupby(plots, key=lambda plot: plot.chart and plot.chart.figure):
        members = list(group)
        charts = [
            {"title": plot.title, "caption": plot.caption, **packed(plot.chart)}
            for plot in members
            if plot.chart is not None
        ]
        # Safe as Markup: matplotlib has escaped every text in the SVG.
        shown = [(plot, Markup(plot.svg)) for plot in members]
        name = f"chart-{members[0].name}"
        chart = {"id": name, "title": title, "charts": charts} if charts else None
        found.append({"id": name, "plots": shown, "chart": chart})
    return found


def _text(name: str) -> str:
    return files("gptattn.compare").joinpath(name).read_text(encoding="utf-8")


def _vendored() -> str:
    """Return uPlot behind its licence, which every copy has to carry."""
    return f"/*\n{_text('vendor/LICENSE')}*/\n{_text('vendor/uPlot.iife.min.js')}"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _environment(comparison: Comparison) -> list[tuple[str, str]]:
    keys = sorted({key for run in comparison.runs for key in run.environment})
    found = []
    for key in keys:
        values = [run.environment.get(key, "unknown") for run in comparison.runs]
        shown = values[0] if len(set(values)) == 1 else counted(values)
        found.append((key.removeprefix("libraries."), shown))
    return found
