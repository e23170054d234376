"""Plots loss against training tokens, FLOPs or seconds: a line and a band for each variant."""

from collections.abc import Mapping, Sequence
from typing import Any

from gptattn.compare.bands import FEWEST_FOR_BAND, Band
from gptattn.compare.chart import Chart, Series
from gptattn.compare.plot_style import (
    MOST,
    Plot,
    drawn,
    legend_below,
    line_look,
    new_figure,
    room_below,
    tick,
)

AXES = {
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "seconds of training",
}
CHOICES = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}
MOST_IN_CHART = 40  # of the page; those that the plot leaves out are switched off


def curve_plot(
    bands: Mapping[str, Band],
    looks: Mapping[str, dict[str, Any]],
    kind: str,
    axis: str,
    prefix: str,
) -> Plot:
    """Plot each row's mean curve and its band over `axis`, a key of AXES; `kind` is val or train.

    The file name begins with `prefix`.
    """
    # Rows are sorted, so these are the baseline and the lowest losses.
    shown = {name: bands[name] for name in list(bands)[:MOST]}
    figure, axes = new_figure(room_below(list(shown)))
    lines = []
    for i, (name, band) in enumerate(shown.items()):
        # Curves lie close together: shift the markers so that they do not cover each other.
        every = max(1, len(band.x) // 6)
        look = looks[name] | {"markevery": (i * every // len(shown), every), "markersize": 4}
        lines += axes.plot(band.x, band.mean, linewidth=1.4, **look)
        draw_spread(axes, band, look["color"])
    low, high = _limits(list(shown.values()))
    axes.set_ylim(low, high)
    if axis != "seconds":
        axes.xaxis.set_major_formatter(tick)
    loss = {"val": "validation loss", "train": "training loss"}[kind]
    axes.set(xlabel=AXES[axis], ylabel=f"{loss} (nats)")
    chart = Chart(
        "Loss over training",
        CHOICES[axis],
        AXES[axis],
        f"{loss} (nats)",
        [
            band_series(name, band, looks[name], on=name in shown)
            for name, band in list(bands.items())[:MOST_IN_CHART]
        ],
        y_range=(low, high),
    )
    legend_below(figure, lines, list(shown))
    caption = _curve_caption(shown, high, len(bands))
    return drawn(figure, f"{prefix}loss_{axis}", f"Loss against {AXES[axis]}", caption, chart)


def draw_spread(axes: Any, band: Band, color: str) -> None:
    """Draw the interval around a band's mean; with few seeds, a line for each instead."""
    if band.low is not None and band.high is not None:
        axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.2, linewidth=0)
    elif band.n > 1:
        axes.plot(band.x, band.seeds.T, color=color, linewidth=0.5, alpha=0.6)


def band_series(name: str, band: Band, look: Mapping[str, Any], *, on: bool) -> Series:
    """Return the chart's series of a band; with few seeds it has a line for each instead."""
    return Series(
        name,
        x=band.x,
        y=band.mean,
        low=band.low,
        high=band.high,
        seeds=[*band.seeds] if band.low is None and band.n > 1 else (),
        n=band.n,
        on=on,
        **line_look(look),
    )


def _curve_caption(shown: Mapping[str, Band], high: float, variants: int) -> str:
    seeds = sorted({band.n for band in shown.values()})
    over = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    caption = f"Mean over {over} seed{'s' * (seeds[-1] > 1)}"
    if seeds[-1] >= FEWEST_FOR_BAND:
        caption += " with its 95% confidence interval."
    else:
        each = "" if seeds[-1] == 1 else " thin lines show each seed, and"
        caption += f";{each} no interval is drawn for fewer than {FEWEST_FOR_BAND} seeds."
    if any((band.mean > high).any() for band in shown.values()):
        caption += " The steep start lies above the plot."
    if variants > len(shown):
        caption += (
            f" Of {variants} variants, the baseline and the {len(shown) - 1} with the lowest "
            "loss are drawn."
        )
    return caption


def _limits(bands: Sequence[Band]) -> tuple[float, float]:
    """Return y limits from the lowest value to the highest after a tenth of the training."""
    longest = max(band.x[-1] for band in bands)
    late = [band.mean[band.x >= longest / 10] for band in bands]
    top = max([float(part.max()) for part in late if len(part)] or [float(bands[0].mean.max())])
    lowest = min(float(band.mean.min()) for band in bands)
    # A band of few seeds can be far wider than the range of the means: it may add half of that
    # range to the plot, and no more.
    ends = [float(band.low[len(band.low) // 2 :].min()) for band in bands if band.low is not None]
    bottom = max(min([lowest, *ends]), lowest - 0.5 * (top - lowest))
    room = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
    return bottom - room, top + room
