"""Averages curves over seeds: mean and 95% band of each variant on a common grid."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptattn.compare.curves import Curve, Curves, Floats
from gptattn.compare.results import Section
from gptattn.compare.statistics import t_factor

GRID = 400  # points of a mean over seeds whose own points differ
# For two seeds Student's t is 12.7, divided by the root of 2: such a band would fill the plot.
FEWEST_FOR_BAND = 3
FEWEST_VALIDATIONS = 4  # with fewer points, plot the training loss instead


@dataclass(frozen=True)
class Band:
    """Mean curve and 95% interval over n seeds, arrays [points].

    `low` and `high` are None below FEWEST_FOR_BAND seeds.
    """

    n: int
    x: Floats
    mean: Floats
    low: Floats | None
    high: Floats | None
    seeds: Floats  # [n, points]


def band(xs: Sequence[Floats], ys: Sequence[Floats]) -> Band | None:
    """Return the mean and Student's 95% interval over the x range that all curves share.

    Curves are interpolated linearly between their points. Return None if they share no range.
    """
    finite = [np.isfinite(x) & np.isfinite(y) for x, y in zip(xs, ys, strict=True)]
    xs = [x[ok] for x, ok in zip(xs, finite, strict=True) if ok.any()]
    ys = [y[ok] for y, ok in zip(ys, finite, strict=True) if ok.any()]
    if not xs:
        return None
    start, end = max(x[0] for x in xs), min(x[-1] for x in xs)
    if start > end:
        return None
    same = all(np.array_equal(x, xs[0]) for x in xs)
    grid = xs[0] if same else np.linspace(start, end, GRID)
    table = np.stack([np.interp(grid, x, y) for x, y in zip(xs, ys, strict=True)])
    mean = table.mean(axis=0)
    if len(table) < FEWEST_FOR_BAND:
        return Band(len(table), grid, mean, None, None, table)
    half = t_factor(len(table)) * table.std(axis=0, ddof=1)
    return Band(len(table), grid, mean, mean - half, mean + half, table)


def curve_kind(section: Section, curves: Mapping[Path, Curves]) -> str:
    """Return `val` if each run with curves has FEWEST_VALIDATIONS validations, else `train`."""
    lengths = [
        len(curves[run.folder].val)
        for row in section.rows
        for run in row.runs
        if run.folder in curves and len(curves[run.folder].train) + len(curves[run.folder].val)
    ]
    return "val" if lengths and min(lengths) >= FEWEST_VALIDATIONS else "train"


def section_bands(
    section: Section, curves: Mapping[Path, Curves], kind: str, axis: str, value: str = "loss"
) -> dict[str, Band]:
    """Return the band of each row that has curves, by row name.

    `kind` is val or train; `axis` is step, tokens, seconds or flops; `value` is a field of Curve.
    """
    found = {}
    for row in section.rows:
        members: list[Curve] = [
            getattr(curves[run.folder], kind).up_to(run.until)
            for run in row.runs
            if run.folder in curves
        ]
        members = [curve for curve in members if len(curve)]
        made = band([getattr(c, axis) for c in members], [getattr(c, value) for c in members])
        if made is not None:
            found[row.name] = made
    return found


def start_time(section: Section, curves: Mapping[Path, Curves], name: str) -> float:
    """Return when the row's first run began, in seconds since 1970; 0 if no run recorded it."""
    (row,) = (row for row in section.rows if row.name == name)
    starts = [curves[run.folder].start for run in row.runs if run.folder in curves]
    return min((s for s in starts if math.isfinite(s)), default=0.0)
