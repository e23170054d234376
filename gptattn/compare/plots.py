"""Draws the figures of a report, as SVG for the page and the paper, and as PNG.

Every variant keeps its colour, marker and line style across a section's figures. matplotlib draws
them all, so the page, the README and a paper show the same figure.
"""

import io
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from gptattn.compare.battery import RECALL, Battery, describe_accuracies
from gptattn.compare.comparison import COSTS, Comparison, Section
from gptattn.compare.curves import (
    MIN_FOR_BAND,
    Band,
    CacheCost,
    Curves,
    Floats,
    PositionLoss,
    accuracies_by_length,
    average_rows,
    cache_costs,
    choose_curves,
    position_losses,
)
from gptattn.compare.statistics import Estimate, pair_by_seed, pareto_front
from gptattn.compare.track import CONTEXTS, Track
from gptattn.compare.verdicts import signed
from gptattn.maps.labels import shorten
from gptattn.runs.metrics import ACCURACY, LOSS, PARAMS

# Placeholder for the page's text colour: a near-black that no palette contains.
INK = "#1b1c1d"
# Okabe and Ito 2008, Color Universal Design: safe for any colour vision. Without yellow and black,
# of which one vanishes on a light background, the other on a dark one.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BETTER, WORSE = COLOURS[0], COLOURS[3]
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
CACHE_MARKERS = (*MARKERS, "*", "<", ">", "h", "p")
MAX_NAMED = 12  # variants in a legend; more are hard to tell apart
COARSE, FINE = (0.25, 0.5, 0.7, 1, 1.4, 2, 3, 4), (0.6, 0.8, 0.9, 1.1, 1.2, 1.6)  # ticks of ratios
FIRST_CONTEXT = 8  # tokens of context from which means are in view; earlier losses are higher
SIZE = (5.2, 3.7)  # inches; the text stays legible at 360 pixels
MARK = {"color": INK, "linewidth": 0.8, "linestyle": (0, (2, 2)), "alpha": 0.7}  # line at a length
LOSS_LABEL = "validation loss (nats)"
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
CURVE_AXES = {"tokens": "training tokens", "flops": "training FLOPs"}
COST_AXES = {
    "params": "parameters",
    "cache": "cache bytes per token",
    "flops": "FLOPs per token",
    "training": "milliseconds per training step",
    "decoding": "milliseconds per decoded token",
}

Look = dict[str, Any]  # how matplotlib draws a variant
T = TypeVar("T")
_label = partial(shorten, longest=32)  # a name in a legend


@dataclass(frozen=True)
class Plot:
    """One figure as SVG and PNG, with its title and caption."""

    name: str  # of its files, without the suffix
    title: str
    caption: str  # on the page
    svg: str
    png: bytes


def draw_plots(
    comparison: Comparison, curves: Mapping[Path, Curves]
) -> tuple[list[Plot], list[list[Plot]]]:
    """Return the plots that span several sections, and those of each section."""
    families: dict[str, list[Section]] = {}
    for section in comparison.sections:
        if all(PARAMS in row.metrics for row in section.rows):
            families.setdefault(section.title_without("model"), []).append(section)
    sized = [members for members in families.values() if len(members) > 1]
    with rc_context(STYLE), warnings.catch_warnings():
        # matplotlib's font lacks some scripts; the SVG keeps the text for the reader's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        across = [
            _cost_plot(members, cost, f"{prefix}{name}")
            for prefix, members in _numbered(sized)
            for cost, name in (("params", "loss_sizes"), ("cache", "loss_sizes_cache"))
        ]
        own = [
            _section_plots(each, curves, prefix) for prefix, each in _numbered(comparison.sections)
        ]
        return [plot for plot in across if plot is not None], own


def _numbered(items: Sequence[T]) -> list[tuple[str, T]]:
    """Return each item with the prefix of its file names: its number if there are several."""
    return [(f"{i}_" if len(items) > 1 else "", item) for i, item in enumerate(items, start=1)]


def _section_plots(section: Section, curves: Mapping[Path, Curves], prefix: str) -> list[Plot]:
    """Return every plot that the section has data for."""
    looks = {row.name: look(i, row.name) for i, row in enumerate(section.rows)}
    kind = choose_curves(section, curves)
    plots = []
    if any(row.difference for row in section.rows):
        plots.append(_forest_plot(section, f"{prefix}forest_loss"))
    loss = {"val": "validation loss", "train": "training loss"}[kind]
    for axis, label in CURVE_AXES.items():
        bands = average_rows(section, curves, kind, axis)
        if any(len(band.x) > 1 for band in bands.values()):
            late = max(band.x[-1] for band in bands.values()) / 10
            axes = _band_axes(bands, looks, late, label, f"{loss} (nats)")
            axes.xaxis.set_major_formatter(format_tick)
            caption = f"The steep start can lie above the plot.{_left_out(bands)}"
            plots.append(_render(axes, f"{prefix}loss_{axis}", f"Loss against {label}", caption))
    of_costs = [_cost_plot([section], cost, f"{prefix}pareto_{cost}") for cost in COSTS]
    plots += [plot for plot in of_costs if plot is not None]
    losses = position_losses(section)
    longest = max((one.length for one in losses), default=0)
    # Each length has other windows, and so a mean over other tokens: it gets its own plot.
    several = len({one.trained for one in losses}) > 1
    for length in sorted({one.length for one in losses if one.length in (one.trained, longest)}):
        shown = [one for one in losses if one.length == length]
        name = f"{prefix}loss_position{f'_{length}' * several}"
        plots.append(_position_plot(shown, looks, name))
    if bands := accuracies_by_length(section):
        lengths = sorted({x for band in bands.values() for x in band.x})
        axes = _band_axes(bands, looks, 0, "tokens in a row", "accuracy")
        _scale_x(axes, lengths, base=2)
        axes.set(xticks=lengths, ylim=(-0.03, 1.03))
        trained = int(section.rows[0].runs[0].settings["model.context_length"])
        axes.axvline(trained, **MARK)
        caption = f"The dashed line marks the trained length.{_left_out(bands)}"
        plots.append(_render(axes, f"{prefix}accuracy_length", "Accuracy by length", caption))
    if costs := cache_costs(section):
        plots.append(_cache_plot(costs, looks, f"{prefix}loss_cache"))
    return plots


def _forest_plot(section: Section, name: str) -> Plot:
    """Plot each row's difference from the baseline: mean, interval and a dot per seed."""
    base, *others = section.rows
    rows = [(row, row.difference) for row in others if row.difference is not None]
    labels = [_label(row.name) for row, _ in rows]
    axes = _forest_axes(labels, 0, SIZE[0] + 0.05 * max(map(len, labels)), 0.4)
    low, high = 0.0, 0.0
    for y, (row, d) in enumerate(rows):
        colour = (BETTER if d.mean < 0 else WORSE) if d.is_significant else INK
        reference, values = pair_by_seed([base.runs, row.runs]).values
        seeds, ends = values - reference, [d.mean]
        if d.interval is not None and d.n >= MIN_FOR_BAND:
            ends += d.interval
            axes.plot(d.interval, (y, y), color=colour, linewidth=1.6, solid_capstyle="butt")
        axes.plot(seeds, np.full(d.n, y + 0.24), ".", color=colour, alpha=0.55, markersize=5)
        axes.plot(d.mean, y, "D", color=colour, markersize=6)
        most = 6 * np.abs(seeds).max()  # with few seeds, an interval can be far wider
        low, high = (
            f(was, *np.clip(ends, -most, most), *seeds) for f, was in ((min, low), (max, high))
        )
    room = 0.06 * (high - low) or 1.0
    axes.set_xlim(low - room, high + room)
    counts = [f"{signed(d.mean)}{'*' * d.is_significant}  n = {d.n}" for _, d in rows]
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(rows)), counts)
    for side, spine in ((axes, "left"), (right, "right")):
        side.tick_params(axis="y", length=0)
        side.spines[spine].set_visible(False)
    axes.set(xlabel=f"validation loss minus {_label(section.baseline)}'s (nats, left is better)")
    caption = (
        "Diamonds: means over seeds; lines: their intervals, which can leave the plot; dots: "
        "single seeds. Coloured, with a star: a difference that the runs show (blue better, orange "
        "worse)."
    )
    return _render(axes, name, f"Difference from {section.baseline}", caption)


def _forest_axes(labels: Sequence[str], origin: float, width: float, row_height: float) -> Any:
    """Return axes with a row for each label, the first at the top, and a line at the origin."""
    axes = new_axes((width, 0.8 + row_height * len(labels)))
    axes.axvline(origin, color=INK, linewidth=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    return axes


def draw_track(track: Track) -> Plot:
    """Draw each entry's effective compute with its interval, the best at the top."""
    budgets = [one.flops for one in track.baseline.values()]
    with rc_context(STYLE):
        labels = [fill(_shorten(track.label(row.entry)), 56) for row in track.rows]
        axes = _forest_axes(labels, 1, SIZE[0] + 1.4, 0.22)
        axes.set_xscale("log", base=2)
        for y, row in enumerate(track.rows):
            kind = row.verdict.partition(",")[0]
            colour = {"better": BETTER, "worse": WORSE}.get(kind, INK)
            least, most = min(budgets) / row.entry.flops, max(budgets) / row.entry.flops
            ends = np.clip(row.effective.interval, least, most)
            axes.plot(ends, (y, y), color=colour, linewidth=1.6, solid_capstyle="butt")
            inside = least < row.effective.value < most
            style = {"marker": "D" if inside else "<>"[row.effective.value > 1], "markersize": 4}
            axes.plot(np.clip(row.effective.value, least, most), y, color=colour, **style)
        low, high = axes.get_xlim()
        _scale_compute(axes, min(low, 0.88), max(high, 1.14))  # ticks on both sides of 1
        return _render(axes, "track", "The attention track")


def draw_battery(battery: Battery) -> Plot:
    """Draw the accuracy of each row on each task, coloured from chance to 1."""
    tasks, rows = [*battery.tasks], battery.rows
    shades = np.full((len(rows), len(tasks)), np.nan)
    with rc_context(STYLE):
        axes = new_axes((2.2 + 0.95 * len(tasks), 0.5 + 0.3 * len(rows)))
        for (y, (name, row)), (x, task) in product(enumerate(rows.items()), enumerate(tasks)):
            if values := battery.list_accuracies(name, task):
                shades[y, x] = (np.mean(values) - row[task].chance) / (1 - row[task].chance)
                colour = "#ffffff" if shades[y, x] > 0.5 else "#101010"  # in light and dark mode
                words = {"ha": "center", "va": "center", "fontsize": 8}
                axes.text(x, y, describe_accuracies(values), color=colour, **words)
        # Not imshow: browsers blur its pixels in an SVG.
        edges = (np.arange(n + 1) - 0.5 for n in (len(tasks), len(rows)))
        axes.pcolormesh(*edges, shades, cmap="Blues", vmin=-0.1, vmax=1.1)
        axes.invert_yaxis()
        axes.set_xticks(range(len(tasks)), tasks)
        axes.set_yticks(range(len(rows)), [fill(_shorten(name), 44) for name in rows], fontsize=8)
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        return _render(axes, "battery", "The battery")


def draw_recall(battery: Battery, track: Track) -> list[Plot]:
    """Draw recall against effective compute, with markers sized by the cache or state.

    Return [] if fewer than two rows are in both tables.
    """
    base = track.baseline[track.budgets[0]]
    budgets = [one.flops for one in track.baseline.values()]  # the ends of its curve
    rows = [(row.effective.value, row.entry) for row in track.rows if row.entry.name != base.name]
    points = [
        (value, 100 * np.mean(values), entry)
        for value, entry in sorted([(1.0, base), *rows], key=lambda one: -one[0])
        if (values := battery.list_accuracies(entry.name, RECALL))
    ]
    if len(points) < 2:
        return []
    legend = [f"cache or state at {CONTEXTS[-1]:,} tokens:"]
    with rc_context(STYLE):
        axes = new_axes((SIZE[0] + 2.4, SIZE[1] + 0.6))
        for i, (value, y, entry) in enumerate(points, start=1):
            low, high = min(budgets) / entry.flops, max(budgets) / entry.flops
            x = min(max(value, low), high)
            cache = entry.caches[-1] if entry.caches else 0
            size = max(4, 0.9 * math.log2(cache or 1) - 8)
            axes.plot(x, y, "o" if cache else "x", color=COLOURS[0], alpha=0.6, markersize=size)
            away = (0, -13 if i % 2 else 8)  # many points lie close together
            mark = f"{'<' * (x <= low)}{i}{'>' * (x >= high)}"  # at an end of the curve or beyond
            axes.annotate(mark, (x, y), away, textcoords="offset points", ha="center")
            line = f"{i}  {_shorten(entry.name)}: {EngFormatter('B', 0)(cache)}"
            legend.append(fill(line, 44, subsequent_indent="     "))
        axes.text(1.02, 1, "\n".join(legend), transform=axes.transAxes, va="top", fontsize=7)
        axes.margins(0.1)
        _scale_compute(axes, *axes.get_xlim())
        axes.set(ylabel=f"{RECALL}, accuracy in %")
        return [_render(axes, "battery_recall", "Recall against effective compute")]


def _scale_compute(axes: Any, low: float, high: float) -> None:
    """Show effective compute between these ends on the x axis, on a log scale."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    ticks = COARSE if high > 5 * low else sorted({*COARSE, *FINE})
    axes.set_xticks([x for x in ticks if low <= x <= high])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("effective compute (right is better)", loc="right")  # long labels leave no room


def _shorten(name: str) -> str:
    """Return the name with `pattern=[a,a,a,b]` as `3 a, 1 b`, and settings by their last word."""

    def count(match: re.Match[str]) -> str:
        runs = [(kind, len([*group])) for kind, group in groupby(match[1].split(","))]
        return ", ".join(f"{length} {kind}" for kind, length in runs)

    name = re.sub(r"pattern=\[([^\]]*)\]", count, name)
    return re.sub(r"\b(attn|part|position)\.(\w+\.)*", "", name)


def _band_axes(
    bands: Mapping[str, Band], looks: Mapping[str, Look], first: float, xlabel: str, ylabel: str
) -> Any:
    """Return axes with the first MAX_NAMED means and their intervals, or a line for each seed.

    The view holds the means from x = `first` on, the lowest mean, and room for bands below it.
    """
    axes = new_axes()
    # Rows are sorted, so these are the baseline and the lowest losses.
    shown = dict(list(bands.items())[:MAX_NAMED])
    for i, (row, band) in enumerate(shown.items()):
        colour = looks[row]["color"]
        if len(band.seeds) >= MIN_FOR_BAND:
            axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.2, linewidth=0)
        elif len(band.seeds) > 1:
            axes.plot(band.x, band.seeds.T, color=colour, linewidth=0.5, alpha=0.6)
        # Curves lie close together: stagger the markers so that they do not overlap.
        every = max(1, len(band.x) // 6)
        markers = {"markevery": (i * every // len(shown), every), "markersize": 4}
        axes.plot(band.x, band.mean, linewidth=1.4, **markers, **looks[row])
    late = [band.mean[band.x >= min(first, band.x[-1])] for band in shown.values()]
    top = max(float(part.max()) for part in late)
    lowest = min(float(band.mean.min()) for band in shown.values())
    # A band over few seeds can be far wider than the range of the means, so it can leave the plot.
    room = 0.05 * (top - lowest) or 0.05 * abs(top) or 1.0
    axes.set_ylim(lowest - 5 * room, top + room)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return axes


def _cost_plot(sections: Sequence[Section], cost: str, name: str) -> Plot | None:
    """Plot mean loss, or a task's mean accuracy, against mean cost, and mark the Pareto front.

    If there are several sections, they differ only in model size, and a line joins the sizes of a
    variant. Return None if the cost of fewer than two rows is known.
    """
    metric = COSTS[cost]
    rows = [row for section in sections for row in section.rows if metric in row.metrics]
    if len(rows) < 2:
        return None
    names = dict.fromkeys(row.name for section in sections for row in section.rows)
    looks = {variant: look(i, variant) for i, variant in enumerate(names)}
    task = all(ACCURACY in row.metrics for row in rows)
    value, sign = (ACCURACY, -1) if task else (LOSS, 1)
    points = np.array([(row.metrics[metric].mean, row.metrics[value].mean) for row in rows])
    best = pareto_front(points[:, 0], sign * points[:, 1])
    # The legend names the first lines: the front, then the best.
    lines: dict[str, list[int]] = {}
    for i in sorted(range(len(rows)), key=lambda i: (i not in best, sign * points[i, 1])):
        lines.setdefault(rows[i].name, []).append(i)
    axes = new_axes()
    for count, (variant, own) in enumerate(lines.items()):
        style, named = looks[variant], count < MAX_NAMED
        joined = points[sorted(own, key=lambda i: points[i, 0])]
        axes.plot(*joined.T, linewidth=1.4, **style | {"marker": None, "label": None})
        for i in own:
            face = style["color"] if i in best else "none"
            label = style["label"] if named and i == own[0] else None
            point = {"linestyle": "none", "markerfacecolor": face, "label": label}
            axes.plot(*points[i], markersize=7, **style | point)
            if named:  # bars of all variants would hide the points
                x, y = (rows[i].metrics[name] for name in (metric, value))
                bars = {"xerr": _bars(x), "yerr": _bars(y)}
                axes.errorbar(*points[i], **bars, color=style["color"], elinewidth=1.2, capsize=2)
    front = points[sorted(best, key=lambda i: points[i, 0])]
    axes.step(*front.T, where="post", color=INK, alpha=0.6, linewidth=1, zorder=1)
    _scale_x(axes, points[:, 0], base=2 if cost == "cache" else 10)
    axes.margins(x=0.12, y=0.12)
    axes.set(
        xlabel=f"{COST_AXES[cost]} (left is better)", ylabel="accuracy" if task else LOSS_LABEL
    )
    caption = "Filled markers: the Pareto front (the line)."
    if len(sections) > 1:
        sizes = ", ".join(section.title_parts["model"] for section in sections)
        caption += f" A line joins the sizes of one variant ({sizes})."
        if family := sections[0].title_without("model"):
            caption += f" All runs: {family}."
    if len(lines) > MAX_NAMED:
        caption += f" Names and bars: {MAX_NAMED} of {len(lines)} variants, the front first."
    over = ", over model sizes" * (len(sections) > 1)
    title = f"{'Accuracy' if task else 'Loss'} against {COST_AXES[cost]}{over}"
    return _render(axes, name, title, caption)


def _position_plot(losses: Sequence[PositionLoss], looks: Mapping[str, Look], name: str) -> Plot:
    """Plot each row's mean loss by tokens of context, in windows of one length."""
    length, trained = losses[0].length, losses[0].trained
    bands = {one.variant: one.band for one in losses}
    axes = _band_axes(bands, looks, FIRST_CONTEXT, "tokens of context", LOSS_LABEL)
    _scale_x(axes, [1, length], base=2)
    caption = (
        "Mean loss by the number of tokens that a prediction sees, two points per doubling, over "
        "whole windows of the held-out text. The first tokens can lie above the plot."
    )
    if length > trained:
        name += "_beyond"
        axes.axvline(trained, **MARK)
        caption += f" The dashed line marks the trained length, {trained:,} tokens."
    title = f"Loss by position, in windows of {length:,} tokens"
    return _render(axes, name, title, caption + _left_out(bands))


def _cache_plot(costs: Sequence[CacheCost], looks: Mapping[str, Look], name: str) -> Plot:
    """Plot each row's loss through each cache against the cache's bytes."""
    variants = list(dict.fromkeys(one.variant for one in costs))
    shown = [one for one in costs if one.variant in variants[:MAX_NAMED]]
    kinds = dict.fromkeys(one.cache for one in costs)
    markers = {kind: CACHE_MARKERS[i % len(CACHE_MARKERS)] for i, kind in enumerate(kinds)}
    axes = new_axes()
    for variant in variants[:MAX_NAMED]:
        own = [(one.bytes_per_token, one.loss.mean) for one in shown if one.variant == variant]
        axes.plot(*zip(*own, strict=True), linewidth=0.9, **looks[variant] | {"marker": None})
    for one in shown:
        style = {"color": looks[one.variant]["color"], "marker": markers[one.cache]}
        bars = {"yerr": _bars(one.loss), "elinewidth": 0.6}
        axes.errorbar(one.bytes_per_token, one.loss.mean, markersize=5, **style, **bars)
    _scale_x(axes, [one.bytes_per_token for one in shown], base=2)
    axes.margins(x=0.08, y=0.1)
    axes.set(xlabel="cache bytes per token (left is better)", ylabel=LOSS_LABEL)
    handles = [
        Line2D([], [], label=_label(kind), marker=marker, color=INK, linestyle="none", markersize=5)
        for kind, marker in markers.items()
    ]
    _add_legend(axes.figure, handles, "outside upper center")
    caption = (
        "A line joins the caches of one variant. Bytes per token: the size of the cache at the "
        f"trained context, divided by its length.{_left_out(variants)}"
    )
    return _render(axes, name, "Loss through cheaper caches", caption)


def look(index: int, name: str) -> Look:
    """Return matplotlib's colour, marker, line style and label for the variant at `index`."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[(index // len(COLOURS) + index) % len(LINES)],
        "label": _label(name),
    }


def new_axes(size: tuple[float, float] = SIZE) -> Any:
    """Return the axes of a new figure of this size, in inches."""
    return Figure(figsize=size, layout="constrained").add_subplot()


def _bars(estimate: Estimate) -> float | None:
    """Return half of the interval's width; None if it is empty or not drawn."""
    if estimate.interval is None or estimate.n < MIN_FOR_BAND:
        return None
    return (estimate.interval[1] - estimate.mean) or None


def format_tick(value: float, position: int | None = None) -> str:
    """Format a tick label: `512`, `16,384`, `20k`, `7T`."""
    exact = abs(value) < 1e5 and value % 1000
    return f"{value:,.5g}" if exact else EngFormatter(sep="")(value, position)


def _scale_x(axes: Any, values: Sequence[float] | Floats, base: int = 10) -> None:
    """Format the x axis, with a log scale if the values are positive and span more than a factor 8.

    Its ticks are 1, 2, 5 for base 10, and powers of two for base 2.
    """
    if min(values) > 0 and max(values) / min(values) > 8:
        axes.set_xscale("log", base=base)
        axes.xaxis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(format_tick)


def _left_out(variants: Collection[str]) -> str:
    """Return the caption's sentence on variants that are not drawn; "" if all are drawn."""
    if len(variants) <= MAX_NAMED:
        return ""
    return f" Only the first {MAX_NAMED} of the table's {len(variants)} variants are drawn."


def _add_legend(figure: Figure, handles: Sequence[Any], where: Any) -> None:
    """Put a legend outside the axes, and add its height to the figure."""
    labels = [handle.get_label() for handle in handles]
    longest = max(map(len, labels))
    columns = 3 if longest <= 10 else 2 if longest <= 22 else 1
    figure.legend(handles=handles, loc=where, ncols=columns, handlelength=3.5)
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))


def _render(axes: Any, name: str, title: str, caption: str = "") -> Plot:
    """Put a legend of any labels below the plot, and render it to SVG and PNG."""
    figure = axes.figure
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        _add_legend(figure, handles, "outside lower center")
    svg, png = io.StringIO(), io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # The salt makes a figure's ids the same each time, and different from other figures'.
    with rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(svg, metadata=nothing)
    # Layout takes longer than drawing, so both files share it.
    figure.set_layout_engine("none")
    # A PNG needs a background: its text stays dark on a dark page.
    figure.set(dpi=200, facecolor="white")
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    return Plot(name, title, caption, _adapt_svg(svg.getvalue(), title), png.getvalue())


def _adapt_svg(svg: str, title: str) -> str:
    """Return the <svg> element for a page, with INK as currentColor and only the ids in use."""
    svg = svg[svg.index("<svg") :].strip().replace(INK, "currentColor")
    # Paths are most of the file; a hundredth of a point is finer than any print.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # Text without a colour would be black, so the root gets one to inherit.
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" fill="currentColor" ', 1)
