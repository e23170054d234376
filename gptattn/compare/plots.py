"""Makes all plots: loss over training, against cost and model size."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context

from gptattn.compare.bands import curve_kind, section_bands
from gptattn.compare.cache_plot import cache_plot
from gptattn.compare.cost_plot import cost_plot
from gptattn.compare.curve_plot import AXES, curve_plot
from gptattn.compare.curves import Curves
from gptattn.compare.evaluations import cache_costs, position_bands, shown_lengths
from gptattn.compare.ladder import LadderReport
from gptattn.compare.ladder_plot import ladder_plot
from gptattn.compare.plot_style import STYLE, Plot, look
from gptattn.compare.position_plot import position_plot
from gptattn.compare.results import COSTS, Section
from gptattn.compare.size_plot import size_plot


def section_plots(section: Section, curves: Mapping[Path, Curves], prefix: str) -> list[Plot]:
    """Return every plot that the section has data for; file names begin with `prefix`."""
    looks = {row.name: look(i) for i, row in enumerate(section.rows)}
    plots = []
    with _styled():
        kind = curve_kind(section, curves)
        for axis in AXES:
            bands = section_bands(section, curves, kind, axis)
            if any(len(band.x) > 1 for band in bands.values()):
                plots.append(curve_plot(bands, looks, kind, axis, prefix))
        for cost, metric in COSTS.items():
            rows = [row for row in section.rows if metric in row.metrics]
            if len(rows) > 1:
                plots.append(cost_plot(rows, looks, cost, prefix))
        for length, trained in shown_lengths(section):
            bands = position_bands(section, length)
            plots.append(position_plot(bands, looks, length, trained, prefix))
        if costs := cache_costs(section):
            plots.append(cache_plot(costs, looks, prefix))
    return plots


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    with rc_context(STYLE), warnings.catch_warnings():
        # matplotlib's font lacks some scripts; the SVG keeps the text, for the reader's own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def size_plots(sections: Sequence[Section]) -> list[Plot]:
    """Return one plot per family of sections that differ only in the model's size."""
    families: dict[str, list[Section]] = {}
    for section in sections:
        if all("cost/params" in row.metrics for row in section.rows):
            families.setdefault(section.family, []).append(section)
    sized = [members for members in families.values() if len(members) > 1]
    with _styled():
        return [
            size_plot(members, f"{i}_" if len(sized) > 1 else "")
            for i, members in enumerate(sized, start=1)
        ]


def ladder_plots(reports: Sequence[LadderReport]) -> list[Plot]:
    """Return a plot per cost of each ladder."""
    with _styled():
        return [
            ladder_plot(report, scaled, f"{i}_" if len(reports) > 1 else "")
            for i, report in enumerate(reports, start=1)
            for scaled in report.costs
        ]
