"""Plots loss against a cost of the variants, with the Pareto front marked."""

from collections.abc import Mapping, Sequence
from typing import Any

from gptattn.compare.bands import FEWEST_FOR_BAND
from gptattn.compare.plot_style import (
    INK,
    MOST,
    Plot,
    drawn,
    legend_below,
    new_figure,
    room_below,
    scale_x,
)
from gptattn.compare.results import COSTS, Estimate, Row

BARS = 40  # with more variants, draw intervals only for those on the front
COST_AXES = {
    "params": "parameters",
    "cache": "cache bytes per token",
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
    axes.step(*zip(*front, strict=True), where="post", color=INK, alpha=0.6, linewidth=1, zorder=1)
    scale_x(axes, [row.metrics[metric].mean for row in rows], base=2 if cost == "cache" else 10)
    axes.margins(x=0.12, y=0.12)
    legend_below(figure, [points[row.name] for row in named], [row.name for row in named])
    better = "right" if cost == "speed" else "left"
    axes.set(xlabel=f"{COST_AXES[cost]} ({better} is better)", ylabel="validation loss (nats)")
    caption = _caption(cost, len(rows), len(named))
    return drawn(figure, f"{prefix}pareto_{cost}", f"Loss against {COST_AXES[cost]}", caption)


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
    if 1 < row.n < FEWEST_FOR_BAND:
        losses = [run.metrics["val/loss"] for run in row.runs]
        axes.plot([x] * row.n, losses, "_", color=color, markersize=9, alpha=0.6)


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
    if estimate.interval is None or estimate.interval[1] == estimate.interval[0]:
        return None
    if estimate.n < FEWEST_FOR_BAND:
        return None
    half = estimate.interval[1] - estimate.mean
    return [[half], [half]]
