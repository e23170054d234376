"""Plots loss against what was spent, over the sizes of a ladder, with the law through them."""

import math

import numpy as np

from gptattn.compare.bands import FEWEST_FOR_BAND
from gptattn.compare.chart import Chart, Series
from gptattn.compare.ladder import LadderReport, Scaled
from gptattn.compare.plot_style import (
    MOST,
    Plot,
    drawn,
    legend_below,
    log_x,
    look,
    new_figure,
    room_below,
)
from gptattn.compare.statistics import t_interval

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
        axes.plot(*_line(name, scaled), color=style["color"], linewidth=1)
        means = scaled.ladder.losses[name].mean(axis=1)
        handles += axes.plot(own, means, style["marker"], color=style["color"], markersize=5)
        axes.plot(own[-1], scaled.predicted[name], "_", color=style["color"], markersize=14)
    log_x(axes)
    axes.set(xlabel=LABELS[scaled.cost], ylabel="validation loss (nats)")
    legend_below(figure, handles, names)
    caption = (
        f"Means over {report.seeds} seed{'s' * (report.seeds > 1)} at {len(report.sizes)} sizes. "
        "Lines: the law through all of them. Dashes: the loss that the law of the smaller sizes "
        "predicts for the largest."
    )
    left_out = len(scaled.ladder.compute) - len(names)
    caption += f" {left_out} more variants are left out." * (left_out > 0)
    chart = Chart(
        "Loss over sizes",
        LABELS[scaled.cost],
        LABELS[scaled.cost],
        "validation loss (nats)",
        [
            series
            for i, name in enumerate(names)
            for series in (_means(name, scaled, i, report.seeds), _law(name, scaled, i))
        ],
        log_x=True,
    )
    title = f"Loss against {LABELS[scaled.cost]}, over sizes"
    return drawn(figure, f"{prefix}ladder_{scaled.cost}", title, caption, chart)


def _line(name: str, scaled: Scaled) -> tuple[np.ndarray, list[float]]:
    """Return points of the variant's law, from its smallest size to its largest."""
    own = scaled.ladder.compute[name]
    spent = np.geomspace(own[0], own[-1], POINTS)
    return spent, [scaled.law.loss(name, x) for x in spent]


def _law(name: str, scaled: Scaled, index: int) -> Series:
    return Series(f"{name}: law", look(index)["color"], *_line(name, scaled))


def _means(name: str, scaled: Scaled, index: int, seeds: int) -> Series:
    losses = scaled.ladder.losses[name]
    found = [t_interval(own) for own in losses]
    shown = [one if one and seeds >= FEWEST_FOR_BAND else (math.nan, math.nan) for one in found]
    return Series(
        name,
        look(index)["color"],
        scaled.ladder.compute[name],
        losses.mean(axis=1),
        low=[low for low, _ in shown],
        high=[high for _, high in shown],
        marker=look(index)["marker"],
        line=False,
        n=seeds,
    )
