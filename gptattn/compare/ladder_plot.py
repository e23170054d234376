"""Plots loss against what was spent, over the sizes of a ladder, with the law through them."""

import numpy as np

from gptattn.compare.ladder import LadderReport, Scaled
from gptattn.compare.plot_style import (
    MOST,
    Plot,
    drawn,
    legend_below,
    look,
    new_figure,
    room_below,
    tick,
)

POINTS = 80  # of a law's line
LABELS = {
    "compute": "training FLOPs",
    "cache": "cache bytes per token",
    "seconds": "seconds of training",
}


def ladder_plot(report: LadderReport, scaled: Scaled, prefix: str) -> Plot:
    """Plot each variant's mean loss at each size, its law, and the prediction of the largest size.

    The file name begins with `prefix`.
    """
    names = list(scaled.ladder.compute)[:MOST]
    figure, axes = new_figure(room_below(names))
    handles = []
    for i, name in enumerate(names):
        own, style = scaled.ladder.compute[name], look(i)
        line = np.geomspace(own[0], own[-1], POINTS)
        axes.plot(line, [scaled.law.loss(name, x) for x in line], color=style["color"], linewidth=1)
        means = scaled.ladder.losses[name].mean(axis=1)
        handles += axes.plot(own, means, style["marker"], color=style["color"], markersize=5)
        axes.plot(own[-1], scaled.predicted[name], "_", color=style["color"], markersize=14)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(tick)
    axes.set(xlabel=LABELS[scaled.cost], ylabel="validation loss (nats)")
    legend_below(figure, handles, names)
    caption = (
        f"Means over {report.seeds} seed{'s' * (report.seeds > 1)} at {len(report.sizes)} sizes. "
        "Lines: the law through all of them. Dashes: the loss that the law of the smaller sizes "
        "predicts for the largest."
    )
    left_out = len(scaled.ladder.compute) - len(names)
    caption += f" {left_out} more variants are left out." * (left_out > 0)
    name = f"{prefix}ladder_{scaled.cost}"
    return drawn(figure, name, f"Loss against {LABELS[scaled.cost]}, over sizes", caption)
