"""Plots loss by the number of tokens that a prediction sees: a line and a band for each variant."""

from collections.abc import Mapping
from typing import Any

from gptattn.compare.bands import FEWEST_FOR_BAND, Band
from gptattn.compare.chart import Chart
from gptattn.compare.curve_plot import band_series, draw_spread
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

FIRST = 8  # tokens of context from which on a mean lies in the plot; before, losses are far higher


def position_plot(
    bands: Mapping[str, Band],
    looks: Mapping[str, dict[str, Any]],
    length: int,
    trained: int,
    prefix: str,
) -> Plot:
    """Plot each row's mean loss by tokens of context, in windows of `length`.

    The file name begins with `prefix`.
    """
    shown = {name: bands[name] for name in list(bands)[:MOST]}
    figure, axes = new_figure(room_below(list(shown)))
    lines = []
    for name, band in shown.items():
        lines += axes.plot(band.x, band.mean, linewidth=1.4, markersize=4, **looks[name])
        draw_spread(axes, band, looks[name]["color"])
    scale_x(axes, [1, length], base=2)
    means = [
        mean for band in shown.values() for mean in band.mean[band.x >= min(FIRST, band.x[-1])]
    ]
    low, high = min(means), max(means)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - room, high + room)
    beyond = length > trained
    if beyond:
        axes.axvline(trained, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7)
    axes.set(xlabel="tokens of context", ylabel="validation loss (nats)")
    legend_below(figure, lines, list(shown))
    title = f"Loss by position, in windows of {length:,} tokens"
    name = f"{prefix}loss_position{'_beyond' * beyond}"
    chart = Chart(
        title,
        "tokens of context",
        "tokens of context",
        "validation loss (nats)",
        [band_series(name, band, looks[name], on=True) for name, band in shown.items()],
        y_range=(low - room, high + room),
        log_x=True,
    )
    return drawn(figure, name, title, _caption(shown, trained, beyond, len(bands)), chart)


def _caption(shown: Mapping[str, Band], trained: int, beyond: bool, variants: int) -> str:
    caption = (
        "Mean loss of the predictions that see so many tokens, two points for each doubling, over "
        "whole windows of the held-out text"
    )
    seeds = max(band.n for band in shown.values())
    if seeds >= FEWEST_FOR_BAND:
        caption += ", with the 95% confidence interval over seeds."
    else:
        caption += "; thin lines show each seed." if seeds > 1 else "."
    caption += " The first tokens, where losses are far higher, may lie above the plot."
    if beyond:
        caption += f" The dashed line is the length of training, {trained:,} tokens."
    if variants > len(shown):
        caption += f" {variants - len(shown)} more variants are left out."
    return caption
