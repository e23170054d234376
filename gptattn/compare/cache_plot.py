"""Plots loss against the bytes of cheaper caches: a colour for each variant, a marker per cache."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from gptattn.compare.bands import FEWEST_FOR_BAND
from gptattn.compare.chart import Chart, Series
from gptattn.compare.cost_plot import bars, ends
from gptattn.compare.evaluations import CacheCost
from gptattn.compare.plot_style import (
    INK,
    MARKERS,
    MOST,
    SIZE,
    Plot,
    drawn,
    legend_below,
    line_look,
    room_below,
    scale_x,
)
from gptattn.compare.results import Estimate

SHAPES = (*MARKERS, "*", "<", ">", "h", "p")
COLUMNS = 3  # of the legend of caches, whose names have up to 20 characters


def cache_plot(
    costs: Sequence[CacheCost], looks: Mapping[str, dict[str, Any]], prefix: str
) -> Plot:
    """Plot each row's loss through each cache, and its change from the full one, against bytes.

    The file name begins with `prefix`.
    """
    variants = list(dict.fromkeys(one.variant for one in costs))
    shown = [one for one in costs if one.variant in variants[:MOST]]
    shapes = {
        kind: SHAPES[i % len(SHAPES)]
        for i, kind in enumerate(dict.fromkeys(c.cache for c in costs))
    }
    room = room_below(variants[:MOST]) + 0.2 * math.ceil(len(shapes) / COLUMNS)
    figure = Figure(figsize=(SIZE[0], 1.6 * SIZE[1] + room), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes in (above, below):
        axes.grid(color=INK, alpha=0.15, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.08, y=0.1)
    lines = []
    for name in variants[:MOST]:
        points = [one for one in shown if one.variant == name]
        lines.append(_line(above, points, [one.loss for one in points], shapes, looks[name]))
        changed = [(one, one.change) for one in points if one.change is not None]
        _line(below, [one for one, _ in changed], [c for _, c in changed], shapes, looks[name])
    scale_x(below, [one.bytes_per_token for one in shown], base=2)
    above.set(ylabel="validation loss (nats)")
    below.set(xlabel="cache bytes per token (left is better)", ylabel="change from full (nats)")
    _legend_above(figure, above, shapes)
    legend_below(figure, lines, variants[:MOST])
    title = "Loss through cheaper caches"
    chart = Chart(
        title,
        "cache bytes",
        "cache bytes per token",
        "validation loss (nats)",
        [_series(name, costs, looks[name]) for name in variants[:MOST]],
        log_x=True,
    )
    return drawn(figure, f"{prefix}loss_cache", title, _caption(shown, len(variants)), chart)


def _series(name: str, costs: Sequence[CacheCost], look: Mapping[str, Any]) -> Series:
    points = [one for one in costs if one.variant == name]
    intervals = [ends(one.loss) for one in points]
    return Series(
        name,
        x=[one.bytes_per_token for one in points],
        y=[one.loss.mean for one in points],
        low=[math.nan if low is None else low[0] for low, _ in intervals],
        high=[math.nan if high is None else high[0] for _, high in intervals],
        labels=[one.cache for one in points],
        marker=look["marker"],
        n=min(one.loss.n for one in points),
        **line_look(look),
    )


def _line(
    axes: Any,
    points: Sequence[CacheCost],
    values: Sequence[Estimate],
    shapes: Mapping[str, str],
    look: Mapping[str, Any],
) -> Any:
    """Draw one row's points, the largest cache first, and the line that joins them; return it."""
    x, y = [one.bytes_per_token for one in points], [value.mean for value in values]
    style = {key: look[key] for key in ("color", "linestyle")}
    (line,) = axes.plot(x, y, linewidth=0.9, alpha=0.7, **style)
    for point, value in zip(points, values, strict=True):
        axes.errorbar(
            point.bytes_per_token,
            value.mean,
            yerr=bars(value),
            color=look["color"],
            marker=shapes[point.cache],
            markersize=5,
            elinewidth=0.6,
            linestyle="none",
        )
    return line


def _legend_above(figure: Figure, axes: Any, shapes: Mapping[str, str]) -> None:
    handles = [
        axes.plot([], [], marker=shape, color=INK, linestyle="none", markersize=5)[0]
        for shape in shapes.values()
    ]
    figure.legend(
        handles, list(shapes), loc="outside upper center", ncols=COLUMNS, handlelength=1.5
    )


def _caption(costs: Sequence[CacheCost], variants: int) -> str:
    caption = (
        "Above, the mean loss of the held-out text decoded through each cache, without training "
        "again; below, what it changes from the full cache of the same runs. A line joins the "
        "caches of one variant. Bytes are those of the cache's tensors at the context of training, "
        "divided by it."
    )
    if max(one.loss.n for one in costs) >= FEWEST_FOR_BAND:
        caption += " Bars: 95% confidence intervals over seeds."
    left = variants - len({one.variant for one in costs})
    return caption + f" {left} more variants are left out." * (left > 0)
