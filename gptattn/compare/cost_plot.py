"""Plots loss against a cost of the variants, with the Pareto front marked."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gptattn.compare.bands import FEWEST_FOR_BAND
from gptattn.compare.chart import Chart, Series
from gptattn.compare.plot_style import (
    INK,
    MOST,
    Plot,
    drawn,
    legend_below,
    new_figure,
    room_below,
    scale_x,
    wide,
)
from gptattn.compare.results import COSTS, Estimate, Row
from gptattn.compare.statistics import Interval

BARS = 40  # with more variants, draw intervals only for those on the front
COST_AXES = {
    "params": "parameters",
    "cache": "cache bytes per token",
    "flops": "FLOPs per token",
    "speed": "tokens/s",
}
CHOICES = {
    "params": "parameters",
    "cache": "cache bytes",
    "flops": "FLOPs",
    "speed": "tokens/s",
}


def cost_plot(
    rows: Sequence[Row], looks: Mapping[str, dict[str, Any]], cost: str, prefix: str
) -> Plot:
    """Plot one point per row: mean loss against mean `cost`, a key of COSTS.

    Every row needs the metric of the cost. The file name begins with `prefix`.
    """
    metric = COSTS[cost]
    # Rows on the front come first in the legend.
    named = sorted(rows, key=lambda row: (cost not in row.fronts, row.loss))[:MOST]
    figure, axes = new_figure(room_below([row.name for row in named]))
    points = {
        row.name: _point(axes, row, cost, looks[row.name], cost in row.fronts or len(rows) <= BARS)
        for row in rows
    }
    front = sorted(
        ((row.metrics[metric].mean, row.loss) for row in rows if cost in row.fronts),
        reverse=cost == "speed",
    )
    chart = Chart(
        "Loss against cost",
        CHOICES[cost],
        COST_AXES[cost],
        "validation loss (nats)",
        [_series(row, cost, looks[row.name]) for row in rows],
        front=_corners(front),
        log_x=wide([row.metrics[metric].mean for row in rows]),
    )
    axes.step(*zip(*front, strict=True), where="post", color=INK, alpha=0.6, linewidth=1, zorder=1)
    scale_x(axes, [row.metrics[metric].mean for row in rows], base=2 if cost == "cache" else 10)
    axes.margins(x=0.12, y=0.12)
    legend_below(figure, [points[row.name] for row in named], [row.name for row in named])
    better = "right" if cost == "speed" else "left"
    axes.set(xlabel=f"{COST_AXES[cost]} ({better} is better)", ylabel="validation loss (nats)")
    caption = _caption(cost, len(rows), len(named))
    title = f"Loss against {COST_AXES[cost]}"
    return drawn(figure, f"{prefix}pareto_{cost}", title, caption, chart)


def _corners(front: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the steps that matplotlib draws through these points."""
    steps = [((x, y), (after, y)) for (x, y), (after, _) in pairwise(front)]
    return [corner for step in steps for corner in step] + list(front[-1:])


def _series(row: Row, cost: str, look: Mapping[str, Any]) -> Series:
    x, y = row.metrics[COSTS[cost]], row.metrics["val/loss"]
    return Series(
        row.name,
        look["color"],
        [x.mean],
        [y.mean],
        *ends(y),
        *ends(x),
        marker=look["marker"],
        filled=cost in row.fronts,
        line=False,
        seeds=seeds(row),
        n=row.n,
    )


def _point(axes: Any, row: Row, cost: str, look: Mapping[str, Any], barred: bool) -> Any:
    x, y = row.metrics[COSTS[cost]], row.metrics["val/loss"]
    seed_dots(axes, x.mean, row, look["color"])
    container = axes.errorbar(
        x.mean,
        y.mean,
        xerr=bars(x) if barred else None,
        yerr=bars(y) if barred else None,
        color=look["color"],
        marker=look["marker"],
        markerfacecolor=look["color"] if cost in row.fronts else "none",
        markersize=7,
        elinewidth=1,
        capsize=2,
        linestyle="none",
    )
    return container.lines[0]


def seed_dots(axes: Any, x: float, row: Row, color: str) -> None:
    """Draw the loss of each seed at `x` if there are several, but too few for an interval."""
    for (loss,) in seeds(row):
        axes.plot(x, loss, "_", color=color, markersize=9, alpha=0.6)


def seeds(row: Row) -> list[list[float]]:
    """Return the loss of each seed if there are several, but too few for an interval."""
    few = 1 < row.n < FEWEST_FOR_BAND
    return [[run.metrics["val/loss"]] for run in row.runs] if few else []


def _caption(cost: str, rows: int, named: int) -> str:
    whose = "" if rows <= BARS else " for those on the front"
    gain = "more tokens/s" if cost == "speed" else "a lower cost"
    caption = (
        f"Means over seeds, with 95% confidence intervals{whose}; with two seeds, dashes show "
        "each seed instead. Filled markers: the Pareto front (the line), where no other variant "
        f"has both a lower mean loss and {gain}."
    )
    return caption + (
        f" The legend names {named} of {rows} variants, the front first." if named < rows else ""
    )


def bars(estimate: Estimate) -> list[list[float]] | None:
    """Return half of the interval for matplotlib, [[down], [up]]; None if none is drawn."""
    interval = _drawn_interval(estimate)
    return None if interval is None else [[interval[1] - estimate.mean]] * 2


def ends(estimate: Estimate) -> tuple[list[float], list[float]] | tuple[None, None]:
    """Return the ends of the interval for a chart; None if none is drawn."""
    interval = _drawn_interval(estimate)
    return (None, None) if interval is None else ([interval[0]], [interval[1]])


def _drawn_interval(estimate: Estimate) -> Interval | None:
    """Return the interval, None if it is of too few seeds to be drawn, or of width 0."""
    low, high = estimate.interval or (0.0, 0.0)
    return (low, high) if high > low and estimate.n >= FEWEST_FOR_BAND else None
