"""What the page needs to draw a plot itself: points, intervals, colours; packed small as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Numbers = Sequence[float] | np.ndarray

# Digits of the packed numbers. A loss shows four decimals, and tokens are counted one by one.
Y_DIGITS, X_DIGITS = 7, 10
APART = 1e-6  # of x, between marked points that would lie at one


@dataclass(frozen=True)
class Series:
    """One variant in a chart: points (x, y), a 95% interval of each where known, and its look.

    Without a marker the points are joined by a line and the intervals are a band; with one, each
    point is marked and has bars, and `line` joins them.
    """

    name: str
    color: str
    x: Numbers
    y: Numbers
    low: Numbers | None = None  # NaN: no interval
    high: Numbers | None = None
    x_low: Numbers | None = None
    x_high: Numbers | None = None
    dash: Sequence[float] = ()  # pixels, drawn and left out in turn
    marker: str = ""  # one of plot_style.MARKERS
    filled: bool = True
    line: bool = True
    labels: Sequence[str] = ()  # of the points, where they are more than an x
    seeds: Sequence[Numbers] = ()  # y of each seed, where they are too few for an interval
    n: int = 1
    on: bool = True  # whether it is drawn before anything is switched


@dataclass(frozen=True)
class Chart:
    """The data of one plot. Plots whose charts share a `figure` are the choices of its x axis."""

    figure: str  # title of the chart on the page
    choice: str  # what this plot is called among the choices
    x: str  # label of the axis
    y: str
    series: Sequence[Series]
    front: Sequence[tuple[float, float]] = ()  # a line in the colour of the text, such as a front
    y_range: tuple[float, float] | None = None  # at first; None: all points
    log_x: bool = False  # at first


def packed(chart: Chart) -> dict[str, Any]:
    """Return the chart as JSON has it; series with equal x refer to one list of them."""
    xs: dict[tuple[float | None, ...], int] = {}
    series = [_packed(each, xs) for each in chart.series]
    return {
        "choice": chart.choice,
        "x": chart.x,
        "y": chart.y,
        "log": chart.log_x,
        "range": chart.y_range and _numbers(chart.y_range, Y_DIGITS),
        "front": [_numbers(values, X_DIGITS) for values in zip(*chart.front, strict=True)],
        "xs": [list(x) for x in xs],
        "series": series,
    }


def _packed(series: Series, xs: dict[tuple[float | None, ...], int]) -> dict[str, Any]:
    # What draws it needs x to increase; the clock of a damaged record need not.
    x, order = np.unique(_apart(series), return_index=True)
    known = np.isfinite(x) & np.isfinite(np.asarray(series.y, dtype=np.float64)[order])
    x, order = _numbers(x[known], X_DIGITS), order[known]
    columns: Mapping[str, Numbers | None] = {
        "y": series.y,
        "low": series.low,
        "high": series.high,
        "x_low": series.x_low,
        "x_high": series.x_high,
    }
    return {
        "name": series.name,
        "color": series.color,
        "dash": list(series.dash),
        "marker": series.marker,
        "filled": series.filled,
        "line": series.line,
        "n": series.n,
        "on": series.on,
        "xs": xs.setdefault(tuple(x), len(xs)),
        "labels": [series.labels[i] for i in order] if series.labels else [],
        **{
            key: _numbers(np.asarray(values, dtype=np.float64)[order], Y_DIGITS)
            for key, values in columns.items()
            if values is not None
        },
        "seeds": [
            _numbers(np.asarray(values, dtype=np.float64)[order], Y_DIGITS)
            for values in series.seeds
        ],
    }


def _apart(series: Series) -> np.ndarray:
    """Return x; marked points of equal x, such as caches of equal bytes, stand side by side."""
    x = np.asarray(series.x, dtype=np.float64)
    return x * (1 + APART * np.arange(len(x))) if series.marker and len({*x}) < len(x) else x


def _numbers(values: Numbers, digits: int) -> list[float | None]:
    """Return the values rounded to so many significant digits; None for what is not finite."""
    found = [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]
    return [int(v) if v is not None and v.is_integer() else v for v in found]
