"""Draws the figures of a report, as SVG for the page and the paper, and as PNG.

Every variant keeps its colour, marker and line through a section's figures. matplotlib draws all of
them, so the page, the README and a paper show the same.
"""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from gptattn.compare.comparison import COSTS, Comparison, Row, Section
from gptattn.compare.curves import (
    FEWEST_FOR_BAND,
    Band,
    CacheCost,
    Curves,
    PositionLoss,
    average_rows,
    cache_costs,
    choose_curves,
    position_losses,
)
from gptattn.compare.ladder import LadderReport, Scaled
from gptattn.compare.statistics import Estimate
from gptattn.compare.verdicts import seed_words

# Placeholder for the page's text colour: a near-black that no palette contains.
INK = "#1b1c1d"
# Okabe and Ito 2008, Color Universal Design: safe for any colour vision. Yellow and black are left
# out: one vanishes on a light background, the other on a dark one.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
CACHE_MARKERS = (*MARKERS, "*", "<", ">", "h", "p")
MAX_NAMED = 12  # variants in a legend; more are hard to tell apart
FIRST_CONTEXT = 8  # tokens of context from which a mean must be visible; earlier losses are higher
SIZE = (5.2, 3.7)  # inches; the text stays legible at a width of 360 pixels
LOSS = "validation loss (nats)"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
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
    "compute": CURVE_AXES["flops"],
    "cache": COST_AXES["cache"],
    "seconds": CURVE_AXES["seconds"],
}
INTERVALS = "95% confidence intervals (with two seeds, {each})"


@dataclass(frozen=True)
class Plot:
    """One figure as SVG and PNG, with its title and caption."""

    name: str  # of its files, without suffix
    title: str
    caption: str
    svg: str
    png: bytes


def draw_plots(
    comparison: Comparison, curves: Mapping[Path, Curves]
) -> tuple[list[Plot], list[list[Plot]]]:
    """Return the plots that span several sections, and those of each section."""
    sections = comparison.sections
    families: dict[str, list[Section]] = {}
    for section in sections:
        if all("cost/params" in row.metrics for row in section.rows):
            families.setdefault(section.title_without("model"), []).append(section)
    sized = [members for members in families.values() if len(members) > 1]
    with rc_context(STYLE), warnings.catch_warnings():
        # matplotlib's font lacks some scripts; the SVG keeps the text, for the reader's own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        across = [
            _ladder_plot(report, scaled, _number(i, comparison.ladders))
            for i, report in enumerate(comparison.ladders, start=1)
            for scaled in report.costs
        ]
        across += [_size_plot(own, _number(i, sized)) for i, own in enumerate(sized, start=1)]
        return across, [
            _section_plots(section, curves, _number(i, sections))
            for i, section in enumerate(sections, start=1)
        ]


def _number(i: int, of: Sequence[object]) -> str:
    """Return how the names of the i-th one's files begin."""
    return f"{i}_" if len(of) > 1 else ""


def _section_plots(section: Section, curves: Mapping[Path, Curves], prefix: str) -> list[Plot]:
    """Return every plot that the section has data for."""
    looks = {row.name: look(i) for i, row in enumerate(section.rows)}
    kind = choose_curves(section, curves)
    plots = []
    for axis in CURVE_AXES:
        bands = average_rows(section, curves, kind, axis)
        if any(len(band.x) > 1 for band in bands.values()):
            plots.append(_curve_plot(bands, looks, kind, axis, f"{prefix}loss_{axis}"))
    for cost, metric in COSTS.items():
        rows = [row for row in section.rows if metric in row.metrics]
        if len(rows) > 1:
            plots.append(_cost_plot(rows, looks, cost, f"{prefix}pareto_{cost}"))
    losses = position_losses(section)
    lengths = sorted({(one.length, one.trained) for one in losses})
    # A longer length has fewer windows, and so a mean over other tokens: each gets its own plot.
    trained = [pair for pair in lengths if pair[0] == pair[1]]
    for length, _ in trained + [pair for pair in lengths if pair[0] > pair[1]][-1:]:
        shown = [one for one in losses if one.length == length]
        plots.append(_position_plot(shown, looks, f"{prefix}loss_position"))
    if costs := cache_costs(section):
        plots.append(_cache_plot(costs, looks, f"{prefix}loss_cache"))
    return plots


def _curve_plot(
    bands: Mapping[str, Band], looks: Mapping[str, dict[str, Any]], kind: str, axis: str, name: str
) -> Plot:
    """Plot each row's mean curve and its band over `axis`; `kind` is val or train."""
    # Rows are sorted, so these are the baseline and the lowest losses.
    shown = {row: bands[row] for row in list(bands)[:MAX_NAMED]}
    figure, axes = new_figure(list(shown))
    lines = []
    for i, (row, band) in enumerate(shown.items()):
        # Curves lie close together: stagger the markers so that they do not overlap.
        every = max(1, len(band.x) // 6)
        style = looks[row] | {"markevery": (i * every // len(shown), every)}
        lines += _draw_band(axes, band, style)
    _set_limits(axes, list(shown.values()), max(band.x[-1] for band in shown.values()) / 10)
    if axis != "seconds":
        axes.xaxis.set_major_formatter(format_tick)
    loss = {"val": "validation loss", "train": "training loss"}[kind]
    axes.set(xlabel=CURVE_AXES[axis], ylabel=f"{loss} (nats)")
    caption = (
        f"Means over {seed_words(band.n for band in shown.values())}; bands are "
        f"{INTERVALS.format(each='thin lines show each')}. The steep start may lie above the plot."
    )
    return _finish(figure, lines, list(bands), name, f"Loss against {CURVE_AXES[axis]}", caption)


def _set_limits(axes: Any, bands: Sequence[Band], start: float) -> None:
    """Show the means from `start` on, the lowest mean, and of the bands what leaves room for it."""
    late = [band.mean[band.x >= min(start, band.x[-1])] for band in bands]
    top = max(float(part.max()) for part in late)
    lowest = min(float(band.mean.min()) for band in bands)
    # A band over few seeds can be far wider than the range of the means: let it add at most half of
    # that range to the plot.
    ends = [float(band.low[len(band.low) // 2 :].min()) for band in bands if band.low is not None]
    bottom = max(min([lowest, *ends]), lowest - 0.5 * (top - lowest))
    room = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
    axes.set_ylim(bottom - room, top + room)


def _cost_plot(
    rows: Sequence[Row], looks: Mapping[str, dict[str, Any]], cost: str, name: str
) -> Plot:
    """Plot one point per row, mean loss against mean cost, with the Pareto front marked."""
    metric = COSTS[cost]
    # Those that the legend names come first: the front, then the lowest losses.
    rows = sorted(rows, key=lambda row: (cost not in row.fronts, row.loss))
    figure, axes = new_figure([row.name for row in rows])
    points = []
    for i, row in enumerate(rows):
        x, style = row.metrics[metric], looks[row.name] | {"linestyle": "none"}
        filled = style["color"] if cost in row.fronts else "none"
        points += axes.plot(x.mean, row.loss, markerfacecolor=filled, markersize=7, **style)
        if i < MAX_NAMED:  # the bars of all would hide the points
            _draw_seeds(axes, x, row, style["color"])
    front = sorted(
        ((row.metrics[metric].mean, row.loss) for row in rows if cost in row.fronts),
        reverse=cost == "speed",
    )
    axes.step(*zip(*front, strict=True), where="post", color=INK, alpha=0.6, linewidth=1, zorder=1)
    _scale_x(axes, [row.metrics[metric].mean for row in rows], base=2 if cost == "cache" else 10)
    axes.margins(x=0.12, y=0.12)
    better, gain = ("right", "more tokens/s") if cost == "speed" else ("left", "a lower cost")
    axes.set(xlabel=f"{COST_AXES[cost]} ({better} is better)", ylabel=LOSS)
    caption = (
        f"Means over seeds; bars are {INTERVALS.format(each='dashes show each')}. Filled markers: "
        "the Pareto front (the line), where no other variant has both a lower mean loss and "
        f"{gain}."
    )
    if len(rows) > MAX_NAMED:
        caption += f" {MAX_NAMED} of {len(rows)} variants have a name and bars, the front first."
    return _finish(
        figure, points, [row.name for row in rows], name, f"Loss against {COST_AXES[cost]}", caption
    )


def _position_plot(
    losses: Sequence[PositionLoss], looks: Mapping[str, dict[str, Any]], name: str
) -> Plot:
    """Plot each row's mean loss by tokens of context, in windows of one length."""
    length, trained = losses[0].length, losses[0].trained
    shown = losses[:MAX_NAMED]
    figure, axes = new_figure([one.variant for one in shown])
    lines = []
    for one in shown:
        lines += _draw_band(axes, one.band, looks[one.variant])
    _scale_x(axes, [1, length], base=2)
    _set_limits(axes, [one.band for one in shown], FIRST_CONTEXT)
    axes.set(xlabel="tokens of context", ylabel=LOSS)
    caption = (
        "Mean loss by the number of tokens that a prediction sees, two points per doubling, over "
        "whole windows of the held-out text; bands are "
        f"{INTERVALS.format(each='thin lines show each')}. The first tokens, "
        "where losses are far higher, may lie above the plot."
    )
    if length > trained:
        name += "_beyond"
        axes.axvline(trained, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7)
        caption += f" The dashed line marks the trained length, {trained:,} tokens."
    title = f"Loss by position, in windows of {length:,} tokens"
    return _finish(figure, lines, [one.variant for one in losses], name, title, caption)


def _cache_plot(costs: Sequence[CacheCost], looks: Mapping[str, dict[str, Any]], name: str) -> Plot:
    """Plot each row's loss through each cache, and its change from the full one, against bytes."""
    variants = list(dict.fromkeys(one.variant for one in costs))
    shown = [one for one in costs if one.variant in variants[:MAX_NAMED]]
    kinds = dict.fromkeys(one.cache for one in costs)
    markers = {kind: CACHE_MARKERS[i % len(CACHE_MARKERS)] for i, kind in enumerate(kinds)}
    height = 1.6 * SIZE[1] + _legend_height(variants[:MAX_NAMED]) + _legend_height(list(markers))
    figure = Figure(figsize=(SIZE[0], height), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    lines = []
    for axes, values in (
        (below, [(one, one.change) for one in shown if one.change]),
        (above, [(one, one.loss) for one in shown]),
    ):
        axes.margins(x=0.08, y=0.1)
        lines = []
        for variant in variants[:MAX_NAMED]:
            colour, dashes = looks[variant]["color"], looks[variant]["linestyle"]
            own = [(one, value) for one, value in values if one.variant == variant]
            x, y = [one.bytes_per_token for one, _ in own], [value.mean for _, value in own]
            lines += axes.plot(x, y, linewidth=0.9, alpha=0.7, color=colour, linestyle=dashes)
            for one, value in own:
                axes.errorbar(
                    one.bytes_per_token,
                    value.mean,
                    yerr=_bars(value),
                    color=colour,
                    marker=markers[one.cache],
                    markersize=5,
                    elinewidth=0.6,
                )
    _scale_x(below, [one.bytes_per_token for one in shown], base=2)
    above.set(ylabel=LOSS)
    below.set(xlabel="cache bytes per token (left is better)", ylabel="change from full (nats)")
    handles = [
        above.plot([], [], marker=marker, color=INK, linestyle="none", markersize=5)[0]
        for marker in markers.values()
    ]
    _add_legend(figure, "outside upper center", handles, list(markers))
    caption = (
        "Above, the mean loss of the held-out text decoded through each cache, without "
        "retraining; below, its change from the full cache of the same runs. A line joins the "
        "caches of one variant. Bytes are those of the cache's tensors at the trained context, "
        "divided by its length. Bars: 95% confidence intervals over three or more seeds."
    )
    return _finish(figure, lines, variants, name, "Loss through cheaper caches", caption)


def _size_plot(sections: Sequence[Section], prefix: str) -> Plot:
    """Plot the rows of sections that differ only in model size; a line joins rows by name."""
    lines: dict[str, list[Row]] = {}
    for section in sections:
        for row in section.rows:
            lines.setdefault(row.name, []).append(row)
    figure, axes = new_figure(list(lines))
    handles, params = [], list[float]()
    for i, rows in enumerate(list(lines.values())[:MAX_NAMED]):
        rows.sort(key=lambda row: row.metrics["cost/params"].mean)
        x = [row.metrics["cost/params"].mean for row in rows]
        handles += axes.plot(x, [row.loss for row in rows], linewidth=1.4, markersize=5, **look(i))
        for row in rows:
            _draw_seeds(axes, row.metrics["cost/params"], row, look(i)["color"])
        params += x
    _scale_x(axes, params)
    axes.set(xlabel="parameters", ylabel=LOSS)
    sizes = ", ".join(section.parts["model"] for section in sections)
    caption = (
        f"A line joins the sizes of one variant ({sizes}). "
        f"Means over seeds; bars are {INTERVALS.format(each='dashes show each')}."
    )
    if family := sections[0].title_without("model"):
        caption += f" All runs: {family}."
    firsts = [section.rows[0].runs[0] for section in sections]
    if len({run.settings.get("model.context_length") for run in firsts}) > 1:
        caption += " The sizes differ in context length, and so in tokens per step."
    return _finish(
        figure, handles, list(lines), f"{prefix}loss_sizes", "Loss against model size", caption
    )


def _ladder_plot(report: LadderReport, scaled: Scaled, prefix: str) -> Plot:
    """Plot each variant's mean loss at each size, its law, and the prediction of the largest."""
    names = list(scaled.ladder.compute)
    figure, axes = new_figure(names)
    handles = []
    for i, name in enumerate(names[:MAX_NAMED]):
        spent, style = scaled.ladder.compute[name], look(i)
        line = np.geomspace(spent[0], spent[-1], 80)
        axes.plot(line, [scaled.law.loss(name, x) for x in line], color=style["color"], linewidth=1)
        means = scaled.ladder.losses[name].mean(axis=1)
        handles += axes.plot(spent, means, style["marker"], color=style["color"], markersize=5)
        axes.plot(spent[-1], scaled.predicted[name], "_", color=style["color"], markersize=14)
    _log_x(axes)
    axes.set(xlabel=LADDER_AXES[scaled.cost], ylabel=LOSS)
    caption = (
        f"Means over {seed_words([report.seeds])} at {len(report.sizes)} sizes. "
        "Lines: the law through all of them. Dashes: the loss that the law of the smaller sizes "
        "predicts for the largest."
    )
    title = f"Loss against {LADDER_AXES[scaled.cost]}, over sizes"
    return _finish(figure, handles, names, f"{prefix}ladder_{scaled.cost}", title, caption)


def look(index: int) -> dict[str, Any]:
    """Return matplotlib's colour, marker and line style for the variant at `index`."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[(index // len(COLOURS) + index) % len(LINES)],
    }


def new_figure(names: Sequence[str]) -> tuple[Figure, Any]:
    """Return a figure and its axes, with room for a legend of the first MAX_NAMED names."""
    height = SIZE[1] + _legend_height(names[:MAX_NAMED])
    figure = Figure(figsize=(SIZE[0], height), layout="constrained")
    return figure, figure.add_subplot()


def _draw_band(axes: Any, band: Band, look: Mapping[str, Any]) -> list[Any]:
    """Draw a mean with its interval, or with a line for each seed if these are few."""
    if band.low is not None and band.high is not None:
        axes.fill_between(band.x, band.low, band.high, color=look["color"], alpha=0.2, linewidth=0)
    elif band.n > 1:
        axes.plot(band.x, band.seeds.T, color=look["color"], linewidth=0.5, alpha=0.6)
    return axes.plot(band.x, band.mean, linewidth=1.4, markersize=4, **look)


def _draw_seeds(axes: Any, x: Estimate, row: Row, colour: str) -> None:
    """Draw the bars of a row's point, or its seeds if there are too few for an interval."""
    if 1 < row.n < FEWEST_FOR_BAND:
        for run in row.runs:
            loss = run.metrics["val/loss"]
            axes.plot(x.mean, loss, "_", color=colour, markersize=9, alpha=0.6)
        return
    bars = {"xerr": _bars(x), "yerr": _bars(row.metrics["val/loss"])}
    axes.errorbar(x.mean, row.loss, **bars, color=colour, elinewidth=1, capsize=2)


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


def _finish(
    figure: Figure,
    handles: Sequence[Any],
    names: Sequence[str],
    name: str,
    title: str,
    caption: str,
) -> Plot:
    """Put a legend below the plot and render it; of many `names`, the first have `handles`."""
    shown = names[:MAX_NAMED]
    _add_legend(figure, "outside lower center", handles[: len(shown)], shown)
    if len(names) > len(handles):
        caption += f" Of {len(names)} variants, the first {len(shown)} in the table are drawn."
    return draw(figure, name, title, caption)


def _add_legend(figure: Figure, loc: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    # matplotlib leaves out labels that begin with an underscore.
    labels = [_shorten(f" {name}" if name.startswith("_") else name) for name in names]
    columns = _legend_columns(names)
    figure.legend(handles, labels, loc=loc, ncols=columns, handlelength=3.5)


def _legend_height(names: Sequence[str]) -> float:
    """Return the height in inches of a legend with these names."""
    return 0.2 * math.ceil(len(names) / _legend_columns(names))


def _legend_columns(names: Sequence[str]) -> int:
    """Return how many legend columns fit into the figure's width."""
    longest = max((len(_shorten(name)) for name in names), default=0)
    return 3 if longest <= 10 else 2 if longest <= 22 else 1


def _shorten(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:31]}…"


def draw(figure: Figure, name: str, title: str, caption: str) -> Plot:
    """Render the figure to SVG and PNG."""
    svg = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # The salt makes ids, and so the file, the same each time, and ids differ between figures.
    with rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(svg, metadata=nothing)
    # Layout takes longer than drawing, so both files use the first one's.
    figure.set_layout_engine("none")
    png = io.BytesIO()
    # A PNG needs a background: its text stays dark on a dark page.
    figure.set(dpi=200, facecolor="white")
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    return Plot(name, title, caption, _adapt_svg(svg.getvalue(), title), png.getvalue())


def _adapt_svg(svg: str, title: str) -> str:
    """Return the <svg> element for a page: INK as currentColor, only ids that are referred to."""
    svg = svg[svg.index("<svg") :].strip().replace(INK, "currentColor")
    # Paths are most of the file: a hundredth of a point is finer than any print.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # Text without a colour would be black, so the root gets one to inherit.
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" fill="currentColor" ', 1)
