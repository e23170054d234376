"""All plots: loss against what it took, against what a variant costs, and against its sizes."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context

from gptattn.compare.bands import curve_kind, section_bands
from gptattn.compare.cost_plot import cost_plot
from gptattn.compare.curve_plot import AXES, curve_plot
from gptattn.compare.curves import Curves
from gptattn.compare.plot_style import STYLE, Plot, look
from gptattn.compare.results import COSTS, Section
from gptattn.compare.size_plot import size_plot


def section_plots(section: Section, curves: Mapping[Path, Curves], prefix: str) -> list[Plot]:
    """All plots that the section's runs have the figures for; file names begin with `prefix`."""
    looks = {row.name: look(i) for i, row in enumerate(section.rows)}
    plots = []
    with rc_context(STYLE), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is shown by the reader's own font.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        kind = curve_kind(section, curves)
        for axis in AXES:
            bands = section_bands(section, curves, kind, axis)
            if any(len(band.x) > 1 for band in bands.values()):
                plots.append(curve_plot(bands, looks, kind, axis, prefix))
        for cost, metric in COSTS.items():
            rows = [row for row in section.rows if metric in row.metrics]
            if len(rows) > 1:
                plots.append(cost_plot(rows, looks, cost, prefix))
    return plots


def size_plots(sections: Sequence[Section]) -> list[Plot]:
    """One for each family of sections that differ in the model's size alone."""
    families: dict[str, list[Section]] = {}
    for section in sections:
        if all("cost/params" in row.metrics for row in section.rows):
            families.setdefault(section.family, []).append(section)
    several = [members for members in families.values() if len(members) > 1]
    with rc_context(STYLE):
        return [
            size_plot(members, f"{i}_" if len(several) > 1 else "")
            for i, members in enumerate(several, start=1)
        ]
