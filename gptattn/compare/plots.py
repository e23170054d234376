"""All plots: loss against what it took, against what a variant costs, and against its sizes."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context

from gptattn.compare.bands import curve_kind, section_bands
from gptattn.compare.cost_plot import cost_plot
from gptattn.compare.curve_plot import AXES, curve_plot
from gptattn.compare.curves import Curves
from gptattn.compare.plot_style import STYLE, Plot, look
from gptattn.compare.results import COSTS, Section
from gptattn.compare.size_plot import size_plot
from gptattn.compare.uptraining_plot import uptraining_plot


def section_plots(section: Section, curves: Mapping[Path, Curves], prefix: str) -> list[Plot]:
    """All plots that the section's runs have the figures for; file names begin with `prefix`."""
    looks = {row.name: look(i) for i, row in enumerate(section.rows)}
    plots = []
    with _styled():
        kind = curve_kind(section, curves)
        # A converted run begins anew: its curve is none of its original's.
        for axis in AXES if section.share is None else ():
            bands = section_bands(section, curves, kind, axis)
            if any(len(band.x) > 1 for band in bands.values()):
                plots.append(curve_plot(bands, looks, kind, axis, prefix))
        for cost, metric in COSTS.items():
            rows = [row for row in section.rows if metric in row.metrics]
            if len(rows) > 1:
                plots.append(cost_plot(rows, looks, cost, prefix))
    return plots


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    with rc_context(STYLE), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is shown by the reader's own font.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def size_plots(sections: Sequence[Section]) -> list[Plot]:
    """One for each family of sections that differ in the model's size alone."""
    sized = [
        section
        for section in sections
        if section.share is None and all("cost/params" in row.metrics for row in section.rows)
    ]
    return _family_plots([each for each in _families(sized) if len(each) > 1], size_plot)


def uptraining_plots(sections: Sequence[Section]) -> list[Plot]:
    """One for each family of sections that differ in the share of steps alone."""
    return _family_plots(
        _families([section for section in sections if section.share is not None]), uptraining_plot
    )


def _families(sections: Sequence[Section]) -> list[list[Section]]:
    families: dict[str, list[Section]] = {}
    for section in sections:
        families.setdefault(section.family, []).append(section)
    return list(families.values())


def _family_plots(
    families: Sequence[list[Section]], plot: Callable[[Sequence[Section], str], Plot]
) -> list[Plot]:
    with _styled():
        return [
            plot(members, f"{i}_" if len(families) > 1 else "")
            for i, members in enumerate(families, start=1)
        ]
