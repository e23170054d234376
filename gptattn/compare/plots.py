"""Draws the figures of a report, as SVG for the page and the paper, and as PNG.

Every variant keeps its colour, marker and line through a section's figures. matplotlib draws all of
them, so the page, the README and a paper show the same.
"""

import contextlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from gptattn.compare.comparison import COSTS, Row, Section
from gptattn.compare.curves import (
    FEWEST_FOR_BAND,
    Band,
    CacheCost,
    Curves,
    average_rows,
    cache_costs,
    choose_curves,
    position_bands,
    shown_lengths,
)
from gptattn.compare.ladder import LadderReport, Scaled
from gptattn.compare.statistics import Estimate

# Placeholder for the page's text colour: a near-black that no palette contains.
INK = "#1b1c1d"
# Okabe and Ito 2008, Color Universal Design: safe for any colour vision. Yellow and black are left
# out: one vanishes on a light background, the other on a dark one.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
CACHE_MARKERS = (*MARKERS, "*", "<", ">", "h", "p")
MAX_NAMED = 12  # variants in a legend; more are hard to tell apart
MAX_BARRED = 40  # with more variants, only those on the front get intervals
FIRST_CONTEXT = 8  # tokens of context from which a mean must be visible; earlier losses are higher
CACHE_COLUMNS = 3  # in the legend of caches, whose names have up to 20 characters
SIZE = (5.2, 3.7)  # inches; the text stays legible at a width of 360 pixels
LOSS = "validation loss (nats)"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
}
CURVE_AXES = {
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "seconds of training",
}
COST_AXES = {
    "params": "parameters",
    "cache": "cache bytes per token",
    "flops": "FLOPs per token",
    "speed": "tokens/s",
}
LADDER_AXES = {
    "compute": "training FLOPs",
    "cache": "cache bytes per token",
    "seconds": "seconds of training",
}


@dataclass(frozen=True)
class Plot:
    """One figure as SVG and PNG, with its title and caption."""

    name: str  # of its files, without suffix
    title: str
    caption: str
    svg: str
    png: bytes


def section_plots(section: Section, curves: Mapping[Path, Curves], prefix: str) -> list[Plot]:
    """Return every plot that the section has data for; file names begin with `prefix`."""
    looks = {row.name: look(i) for i, row in enumerate(section.rows)}
    plots = []
    with _styled():
        kind = choose_curves(section, curves)
        for axis in CURVE_AXES:
            bands = average_rows(section, curves, kind, axis)
            if any(len(band.x) > 1 for band in bands.values()):
                plots.append(_curve_plot(bands, looks, kind, axis, prefix))
        for cost, metric in COSTS.items():
            rows = [row for row in section.rows if metric in row.metrics]
            if len(rows) > 1:
                plots.append(_cost_plot(rows, looks, cost, prefix))
        for length, trained in shown_lengths(section):
            bands = position_bands(section, length)
            plots.append(_position_plot(bands, looks, length, trained, prefix))
        if costs := cache_costs(section):
            plots.append(_cache_plot(costs, looks, prefix))
    return plots


def size_plots(sections: Sequence[Section]) -> list[Plot]:
    """Return one plot per family of sections that differ only in the model's size."""
    families: dict[str, list[Section]] = {}
    for section in sections:
        if all("cost/params" in row.metrics for row in section.rows):
            families.setdefault(section.family, []).append(section)
    sized = [members for members in families.values() if len(members) > 1]
    with _styled():
        return [
            _size_plot(members, f"{i}_" if len(sized) > 1 else "")
            for i, members in enumerate(sized, start=1)
        ]


def ladder_plots(reports: Sequence[LadderReport]) -> list[Plot]:
    """Return a plot per cost of each ladder."""
    with _styled():
        return [
            _ladder_plot(report, scaled, f"{i}_" if len(reports) > 1 else "")
            for i, report in enumerate(reports, start=1)
            for scaled in report.costs
        ]


def _curve_plot(
    bands: Mapping[str, Band],
    looks: Mapping[str, dict[str, Any]],
    kind: str,
    axis: str,
    prefix: str,
) -> Plot:
    """Plot each row's mean curve and its band over `axis`; `kind` is val or train."""
    # Rows are sorted, so these are the baseline and the lowest losses.
    shown = {name: bands[name] for name in list(bands)[:MAX_NAMED]}
    figure, axes = new_figure(list(shown))
    lines = []
    for i, (name, band) in enumerate(shown.items()):
        # Curves lie close together: stagger the markers so that they do not overlap.
        every = max(1, len(band.x) // 6)
        style = looks[name] | {"markevery": (i * every // len(shown), every)}
        lines += _draw_band(axes, band, style)
    low, high = _curve_limits(list(shown.values()))
    axes.set_ylim(low, high)
    if axis != "seconds":
        axes.xaxis.set_major_formatter(format_tick)
    loss = {"val": "validation loss", "train": "training loss"}[kind]
    axes.set(xlabel=CURVE_AXES[axis], ylabel=f"{loss} (nats)")
    _add_legend(figure, lines, list(shown))
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
    if len(bands) > len(shown):
        caption += (
            f" Of {len(bands)} variants, the baseline and the {len(shown) - 1} with the lowest "
            "loss are drawn."
        )
    return draw(figure, f"{prefix}loss_{axis}", f"Loss against {CURVE_AXES[axis]}", caption)


def _curve_limits(bands: Sequence[Band]) -> tuple[float, float]:
    """Return y limits from the lowest value to the highest after a tenth of the training."""
    longest = max(band.x[-1] for band in bands)
    late = [band.mean[band.x >= longest / 10] for band in bands]
    top = max([float(part.max()) for part in late if len(part)] or [float(bands[0].mean.max())])
    lowest = min(float(band.mean.min()) for band in bands)
    # A band over few seeds can be far wider than the range of the means: let it add at most half of
    # that range to the plot.
    ends = [float(band.low[len(band.low) // 2 :].min()) for band in bands if band.low is not None]
    bottom = max(min([lowest, *ends]), lowest - 0.5 * (top - lowest))
    room = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
    return bottom - room, top + room


def _cost_plot(
    rows: Sequence[Row], looks: Mapping[str, dict[str, Any]], cost: str, prefix: str
) -> Plot:
    """Plot one point per row, mean loss against mean cost, with the Pareto front marked."""
    metric = COSTS[cost]
    # Rows on the front come first in the legend.
    named = sorted(rows, key=lambda row: (cost not in row.fronts, row.loss))[:MAX_NAMED]
    figure, axes = new_figure([row.name for row in named])
    points = {}
    for row in rows:
        x, on_front = row.metrics[metric], cost in row.fronts
        barred = on_front or len(rows) <= MAX_BARRED
        colour = looks[row.name]["color"]
        _draw_seeds(axes, x.mean, row, colour)
        points[row.name] = axes.errorbar(
            x.mean,
            row.loss,
            xerr=_bars(x) if barred else None,
            yerr=_bars(row.metrics["val/loss"]) if barred else None,
            color=colour,
            marker=looks[row.name]["marker"],
            markerfacecolor=colour if on_front else "none",
            markersize=7,
            elinewidth=1,
            capsize=2,
            linestyle="none",
        ).lines[0]
    front = sorted(
        ((row.metrics[metric].mean, row.loss) for row in rows if cost in row.fronts),
        reverse=cost == "speed",
    )
    axes.step(*zip(*front, strict=True), where="post", color=INK, alpha=0.6, linewidth=1, zorder=1)
    _scale_x(axes, [row.metrics[metric].mean for row in rows], base=2 if cost == "cache" else 10)
    axes.margins(x=0.12, y=0.12)
    better = "right" if cost == "speed" else "left"
    axes.set(xlabel=f"{COST_AXES[cost]} ({better} is better)", ylabel=LOSS)
    _add_legend(figure, [points[row.name] for row in named], [row.name for row in named])
    whose = "" if len(rows) <= MAX_BARRED else " for those on the front"
    gain = "more tokens/s" if cost == "speed" else "a lower cost"
    caption = (
        f"Means over seeds, with 95% confidence intervals{whose}; with two seeds, dashes show "
        "each seed instead. Filled markers: the Pareto front (the line), where no other variant "
        f"has both a lower mean loss and {gain}."
    )
    if len(named) < len(rows):
        caption += f" The legend names {len(named)} of {len(rows)} variants, the front first."
    return draw(figure, f"{prefix}pareto_{cost}", f"Loss against {COST_AXES[cost]}", caption)


def _position_plot(
    bands: Mapping[str, Band],
    looks: Mapping[str, dict[str, Any]],
    length: int,
    trained: int,
    prefix: str,
) -> Plot:
    """Plot each row's mean loss by tokens of context, in windows of `length`."""
    shown = {name: bands[name] for name in list(bands)[:MAX_NAMED]}
    figure, axes = new_figure(list(shown))
    lines = []
    for name, band in shown.items():
        lines += _draw_band(axes, band, looks[name])
    _scale_x(axes, [1, length], base=2)
    means = [
        mean
        for band in shown.values()
        for mean in band.mean[band.x >= min(FIRST_CONTEXT, band.x[-1])]
    ]
    low, high = min(means), max(means)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - room, high + room)
    beyond = length > trained
    if beyond:
        axes.axvline(trained, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7)
    axes.set(xlabel="tokens of context", ylabel=LOSS)
    _add_legend(figure, lines, list(shown))
    caption = (
        "Mean loss by the number of tokens that a prediction sees, two points per doubling, over "
        "whole windows of the held-out text"
    )
    seeds = max(band.n for band in shown.values())
    if seeds >= FEWEST_FOR_BAND:
        caption += ", with the 95% confidence interval over seeds."
    else:
        caption += "; thin lines show each seed." if seeds > 1 else "."
    caption += " The first tokens, where losses are far higher, may lie above the plot."
    if beyond:
        caption += f" The dashed line marks the trained length, {trained:,} tokens."
    caption += _left_out(len(bands) - len(shown))
    title = f"Loss by position, in windows of {length:,} tokens"
    return draw(figure, f"{prefix}loss_position{'_beyond' * beyond}", title, caption)


def _cache_plot(
    costs: Sequence[CacheCost], looks: Mapping[str, dict[str, Any]], prefix: str
) -> Plot:
    """Plot each row's loss through each cache, and its change from the full one, against bytes."""
    variants = list(dict.fromkeys(one.variant for one in costs))
    named = variants[:MAX_NAMED]
    shown = [one for one in costs if one.variant in named]
    kinds = dict.fromkeys(one.cache for one in costs)
    markers = {kind: CACHE_MARKERS[i % len(CACHE_MARKERS)] for i, kind in enumerate(kinds)}
    room = _legend_height(named) + 0.2 * math.ceil(len(markers) / CACHE_COLUMNS)
    figure = Figure(figsize=(SIZE[0], 1.6 * SIZE[1] + room), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    lines = []
    for axes, value_of in (
        (above, lambda one: one.loss),
        (below, lambda one: one.change),
    ):
        axes.grid(color=INK, alpha=0.15, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.08, y=0.1)
        lines = [
            _draw_caches(
                axes,
                [one for one in shown if one.variant == name and value_of(one) is not None],
                value_of,
                markers,
                looks[name],
            )
            for name in named
        ]
    _scale_x(below, [one.bytes_per_token for one in shown], base=2)
    above.set(ylabel=LOSS)
    below.set(xlabel="cache bytes per token (left is better)", ylabel="change from full (nats)")
    handles = [
        above.plot([], [], marker=marker, color=INK, linestyle="none", markersize=5)[0]
        for marker in markers.values()
    ]
    figure.legend(
        handles, list(markers), loc="outside upper center", ncols=CACHE_COLUMNS, handlelength=1.5
    )
    _add_legend(figure, lines, named)
    caption = (
        "Above, the mean loss of the held-out text decoded through each cache, without "
        "retraining; below, its change from the full cache of the same runs. A line joins the "
        "caches of one variant. Bytes are those of the cache's tensors at the trained context, "
        "divided by its length."
    )
    if max(one.loss.n for one in shown) >= FEWEST_FOR_BAND:
        caption += " Bars: 95% confidence intervals over seeds."
    caption += _left_out(len(variants) - len(named))
    return draw(figure, f"{prefix}loss_cache", "Loss through cheaper caches", caption)


def _draw_caches(
    axes: Any,
    points: Sequence[CacheCost],
    value_of: Callable[[CacheCost], Any],
    markers: Mapping[str, str],
    look: Mapping[str, Any],
) -> Any:
    """Draw one row's points, the largest cache first, and the line that joins them; return it."""
    (line,) = axes.plot(
        [point.bytes_per_token for point in points],
        [value_of(point).mean for point in points],
        linewidth=0.9,
        alpha=0.7,
        color=look["color"],
        linestyle=look["linestyle"],
    )
    for point in points:
        axes.errorbar(
            point.bytes_per_token,
            value_of(point).mean,
            yerr=_bars(value_of(point)),
            color=look["color"],
            marker=markers[point.cache],
            markersize=5,
            elinewidth=0.6,
            linestyle="none",
        )
    return line


def _size_plot(sections: Sequence[Section], prefix: str) -> Plot:
    """Plot the rows of sections that differ only in model size; a line joins rows by name."""
    lines: dict[str, list[tuple[float, Row]]] = {}
    for section in sections:
        for row in section.rows:
            lines.setdefault(row.name, []).append((row.metrics["cost/params"].mean, row))
    shown = dict(list(lines.items())[:MAX_NAMED])
    figure, axes = new_figure(list(shown))
    handles = []
    for i, points in enumerate(shown.values()):
        points.sort(key=lambda point: point[0])
        x, y = [params for params, _ in points], [row.loss for _, row in points]
        handles += axes.plot(x, y, linewidth=1.4, markersize=5, **look(i))
        for params, row in points:
            _draw_seeds(axes, params, row, look(i)["color"])
            half = _bars(row.metrics["val/loss"])
            axes.errorbar(params, row.loss, yerr=half, capsize=2, color=look(i)["color"])
    _scale_x(axes, [params for points in shown.values() for params, _ in points])
    axes.set(xlabel="parameters", ylabel=LOSS)
    _add_legend(figure, handles, list(shown))
    sizes = ", ".join(section.size for section in sections)
    caption = (
        f"A line joins the sizes of one variant ({sizes}). Means over seeds, with 95% confidence "
        "intervals; with two seeds, dashes show each seed instead."
    )
    if sections[0].family:
        caption += f" All runs: {sections[0].family}."
    firsts = [section.rows[0].runs[0] for section in sections]
    if len({run.settings.get("model.context_length") for run in firsts}) > 1:
        caption += " The sizes differ in context length, and so in tokens per step."
    caption += _left_out(len(lines) - len(shown))
    return draw(figure, f"{prefix}loss_sizes", "Loss against model size", caption)


def _ladder_plot(report: LadderReport, scaled: Scaled, prefix: str) -> Plot:
    """Plot each variant's mean loss at each size, its law, and the prediction of the largest."""
    names = list(scaled.ladder.compute)[:MAX_NAMED]
    figure, axes = new_figure(names)
    handles = []
    for i, name in enumerate(names):
        spent, style = scaled.ladder.compute[name], look(i)
        line = np.geomspace(spent[0], spent[-1], 80)
        axes.plot(line, [scaled.law.loss(name, x) for x in line], color=style["color"], linewidth=1)
        means = scaled.ladder.losses[name].mean(axis=1)
        handles += axes.plot(spent, means, style["marker"], color=style["color"], markersize=5)
        axes.plot(spent[-1], scaled.predicted[name], "_", color=style["color"], markersize=14)
    _log_x(axes)
    axes.set(xlabel=LADDER_AXES[scaled.cost], ylabel=LOSS)
    _add_legend(figure, handles, names)
    caption = (
        f"Means over {report.seeds} seed{'s' * (report.seeds > 1)} at {len(report.sizes)} sizes. "
        "Lines: the law through all of them. Dashes: the loss that the law of the smaller sizes "
        "predicts for the largest."
    )
    caption += _left_out(len(scaled.ladder.compute) - len(names))
    title = f"Loss against {LADDER_AXES[scaled.cost]}, over sizes"
    return draw(figure, f"{prefix}ladder_{scaled.cost}", title, caption)


def _left_out(variants: int) -> str:
    return f" {variants} more variants are left out." * (variants > 0)


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    with rc_context(STYLE), warnings.catch_warnings():
        # matplotlib's font lacks some scripts; the SVG keeps the text, for the reader's own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def look(index: int) -> dict[str, Any]:
    """Return matplotlib's colour, marker and line style for the variant at `index`."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[(index // len(COLOURS) + index) % len(LINES)],
    }


def new_figure(names: Sequence[str] = (), extra: float = 0.0) -> tuple[Figure, Any]:
    """Return a figure of the common style and its axes, with room for a legend of these names.

    `extra` inches are added to its height.
    """
    height = SIZE[1] + _legend_height(names) + extra
    figure = Figure(figsize=(SIZE[0], height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _draw_band(axes: Any, band: Band, look: Mapping[str, Any]) -> list[Any]:
    """Draw a mean with its interval, or with a line for each seed if these are few."""
    if band.low is not None and band.high is not None:
        axes.fill_between(band.x, band.low, band.high, color=look["color"], alpha=0.2, linewidth=0)
    elif band.n > 1:
        axes.plot(band.x, band.seeds.T, color=look["color"], linewidth=0.5, alpha=0.6)
    return axes.plot(band.x, band.mean, linewidth=1.4, markersize=4, **look)


def _draw_seeds(axes: Any, x: float, row: Row, colour: str) -> None:
    """Draw the loss of each seed at `x` if there are several, but too few for an interval."""
    if 1 < row.n < FEWEST_FOR_BAND:
        for run in row.runs:
            axes.plot(x, run.metrics["val/loss"], "_", color=colour, markersize=9, alpha=0.6)


def _bars(estimate: Estimate) -> list[list[float]] | None:
    """Return half of the interval for matplotlib, [[down], [up]]; None if none is drawn."""
    low, high = estimate.interval or (0.0, 0.0)
    if high <= low or estimate.n < FEWEST_FOR_BAND:
        return None
    return [[high - estimate.mean]] * 2


def format_tick(value: float, position: int | None = None) -> str:
    """Format a tick label: `512`, `16,384`, `20k`, `7T`."""
    exact = abs(value) < 1e5 and value % 1000
    return f"{value:,.5g}" if exact else EngFormatter(sep="")(value, position)


def _scale_x(axes: Any, values: Sequence[float], base: int = 10) -> None:
    """Format the x axis; use a log scale if the values, all positive, span more than 8 times."""
    if min(values) > 0 and max(values) / min(values) > 8:
        _log_x(axes, base)
    axes.xaxis.set_major_formatter(format_tick)


def _log_x(axes: Any, base: int = 10) -> None:
    """Use a log scale, with ticks at 1, 2, 5 for base 10, and at powers of two for base 2."""
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(format_tick)


def _shorten(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:31]}…"


def _add_legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Put a legend below the plot, where `new_figure` has left room for it."""
    # matplotlib leaves out labels that begin with an underscore.
    labels = [_shorten(f" {name}" if name.startswith("_") else name) for name in names]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=_legend_columns(names), handlelength=3.5
    )


def _legend_height(names: Sequence[str]) -> float:
    """Return the height in inches of a legend with these names."""
    return 0.2 * math.ceil(len(names) / _legend_columns(names))


def _legend_columns(names: Sequence[str]) -> int:
    """Return how many legend columns fit into the figure's width."""
    longest = max((len(_shorten(name)) for name in names), default=0)
    return 3 if longest <= 10 else 2 if longest <= 22 else 1


def draw(figure: Figure, name: str, title: str, caption: str) -> Plot:
    """Render the figure to SVG and PNG."""
    svg = io.StringIO()
    # A fixed salt makes the ids, and so the file, the same each time.
    with rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    # Layout takes longer than drawing, so both files use the first one's.
    figure.set_layout_engine("none")
    png = io.BytesIO()
    # A PNG needs a background: its text stays dark on a dark page.
    figure.set(dpi=200, facecolor="white")
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    return Plot(name, title, caption, _adapt_svg(svg.getvalue(), name, title), png.getvalue())


def _adapt_svg(svg: str, name: str, title: str) -> str:
    """Return the <svg> element: INK as currentColor, no background, ids prefixed with `name`."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    # Paths are most of the file: a hundredth of a point is finer than any print.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    # The figure's and the axes' white backgrounds.
    svg = re.sub(r'<g id="patch_[12]">.*?</g>', "", svg, count=2, flags=re.DOTALL)
    for pattern in (r'(\bid=")', r"(url\(#)", r'(xlink:href="#)'):
        svg = re.sub(pattern, rf"\g<1>{name}-", svg)
    end = svg.index(">")
    head = re.sub(r' (width|height)="[^"]*pt"', "", svg[:end])
    # Text without a colour would be black, so the root gets fill="currentColor" to inherit.
    return f'{head} role="img" aria-label="{title}" fill="currentColor">{svg[end + 1 :]}'.strip()
