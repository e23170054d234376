"""Plots loss against parameters over several model sizes: a line for each variant."""

import math
from collections.abc import Sequence

from gptattn.compare.chart import Chart, Series
from gptattn.compare.cost_plot import bars, seed_dots
from gptattn.compare.plot_style import (
    MOST,
    Plot,
    drawn,
    legend_below,
    line_look,
    look,
    new_figure,
    room_below,
    scale_x,
    wide,
)
from gptattn.compare.results import Row, Section


def size_plot(sections: Sequence[Section], prefix: str) -> Plot:
    """Plot the rows of sections that differ only in model size; a line joins rows of one name.

    The file name begins with `prefix`.
    """
    lines: dict[str, list[tuple[float, Row]]] = {}
    for section in sections:
        for row in section.rows:
            lines.setdefault(row.name, []).append((row.metrics["cost/params"].mean, row))
    shown = dict(list(lines.items())[:MOST])
    figure, axes = new_figure(room_below(list(shown)))
    handles = []
    for i, points in enumerate(shown.values()):
        points.sort(key=lambda point: point[0])
        x, y = [params for params, _ in points], [row.loss for _, row in points]
        handles += axes.plot(x, y, linewidth=1.4, markersize=5, **look(i))
        for params, row in points:
            seed_dots(axes, params, row, look(i)["color"])
            half = bars(row.metrics["val/loss"])
            axes.errorbar(params, row.loss, yerr=half, capsize=2, color=look(i)["color"])
    sizes = [params for points in shown.values() for params, _ in points]
    scale_x(axes, sizes)
    axes.set(xlabel="parameters", ylabel="validation loss (nats)")
    legend_below(figure, handles, list(shown))
    caption = _caption(sections, len(lines) - len(shown))
    title, loss = "Loss against model size", "validation loss (nats)"
    series = [row_series(name, points, i) for i, (name, points) in enumerate(shown.items())]
    chart = Chart(title, "parameters", "parameters", loss, series, log_x=wide(sizes))
    return drawn(figure, f"{prefix}loss_sizes", title, caption, chart)


def row_series(name: str, points: Sequence[tuple[float, Row]], index: int) -> Series:
    """Return the chart's series of one variant: its mean losses, joined, with their intervals.

    `points` holds x and row, with increasing x; `index` gives the look.
    """
    # NaN: no interval.
    intervals = [bars(row.metrics["val/loss"]) or [[math.nan]] * 2 for _, row in points]
    losses = [row.loss for _, row in points]
    return Series(
        name,
        x=[x for x, _ in points],
        y=losses,
        low=[loss - down for loss, ((down,), _) in zip(losses, intervals, strict=True)],
        high=[loss + up for loss, (_, (up,)) in zip(losses, intervals, strict=True)],
        marker=look(index)["marker"],
        n=min(row.n for _, row in points),
        **line_look(look(index)),
    )


def _caption(sections: Sequence[Section], left_out: int) -> str:
    sizes = ", ".join(section.size for section in sections)
    caption = (
        f"A line joins the sizes of one variant ({sizes}). Means over seeds, with 95% confidence "
        "intervals; with two seeds, dashes show each seed instead."
    )
    if sections[0].family:
        caption += f" All runs: {sections[0].family}."
    contexts = {
        section.rows[0].runs[0].settings.get("model.context_length") for section in sections
    }
    if len(contexts) > 1:
        caption += " The sizes differ in context length, and so in tokens per step."
    return caption + f" {left_out} more variants are left out." * (left_out > 0)
