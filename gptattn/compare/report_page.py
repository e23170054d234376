"""Makes the report page: one self-contained HTML file; all text from run folders is escaped."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from gptattn.compare.evaluation_tables import evaluation_tables
from gptattn.compare.plot_style import Plot
from gptattn.compare.results import Comparison, Section
from gptattn.compare.sections import axes_of, differences
from gptattn.compare.setting_words import counted
from gptattn.compare.table import report_rows
from gptattn.compare.verdicts import headline, match_words, section_words, sure_words
from gptattn.compare.wholes import wholes
from gptattn.machine.template import filled


def page_text(
    comparison: Comparison, plots: Sequence[Sequence[Plot]], across: Sequence[Plot]
) -> str:
    """Return the page's HTML.

    `plots` holds the plots of each section, in the sections' order; `across`, those that span
    several sections.
    """
    return filled(
        "gptattn.compare",
        "page.html.j2",
        comparison=comparison,
        headline=headline(comparison),
        sections=[
            _section(section, group)
            for section, group in zip(comparison.sections, plots, strict=True)
        ],
        wholes=wholes(comparison),
        across=_shown(across),
        uptrained=any(section.share is not None for section in comparison.sections),
        must_split=differences(comparison.runs),
        axes=", ".join(axes_of(comparison.runs)),
        environment=_environment(comparison),
    )


def _section(section: Section, plots: Sequence[Plot]) -> dict[str, Any]:
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
        "plots": _shown(plots),
        "evaluations": evaluation_tables(section),
        "rows": section.rows,
    }


def _shown(plots: Sequence[Plot]) -> list[tuple[Plot, Markup]]:
    # Safe as Markup: matplotlib has escaped every text in the SVG.
    return [(plot, Markup(plot.svg)) for plot in plots]


def _environment(comparison: Comparison) -> list[tuple[str, str]]:
    keys = sorted({key for run in comparison.runs for key in run.environment})
    found = []
    for key in keys:
        values = [run.environment.get(key, "unknown") for run in comparison.runs]
        shown = values[0] if len(set(values)) == 1 else counted(values)
        found.append((key.removeprefix("libraries."), shown))
    return found
