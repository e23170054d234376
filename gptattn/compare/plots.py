"""The plots: loss against what it took, and against what the variant costs, as SVG and PNG."""

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from gptattn.compare.bands import Band, curve_kind, section_bands
from gptattn.compare.comparison import COSTS, Row, Section
from gptattn.compare.curves import Curves
from gptattn.compare.svg import INK, adapted

# Okabe and Ito 2008, Color Universal Design: told apart with any colour vision. Their yellow is
# left out, and black, as one of the two vanishes on either background.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
MOST = 12  # variants in a plot of curves; more cannot be told apart
FEW = 6  # variants whose legend has room within the plot
BARS = 40  # variants, above which only those on the front have their intervals drawn
LINE = 11  # points from one line of text to the next
SIZE = (5.2, 3.7)  # inches: at 360 pixels of width the text is still read
AXES = {
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "seconds of training",
}
COST_AXES = {
    "params": "parameters",
    "cache": "cache bytes per token",
    "speed": "tokens/s",
}
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


@dataclass(frozen=True)
class Plot:
    """One figure in both forms, with what a reader must know to read it."""

    name: str  # of its files
    title: str
    caption: str
    svg: str
    png: bytes


def section_plots(section: Section, curves: Mapping[Path, Curves], prefix: str) -> list[Plot]:
    """All plots that the section's runs have the figures for; file names begin with `prefix`."""
    looks = {row.name: _look(i) for i, row in enumerate(section.rows)}
    plots = []
    with rc_context(STYLE), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is shown by the reader's own font.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        kind = curve_kind(section, curves)
        for axis in AXES:
            bands = section_bands(section, curves, kind, axis)
            if any(len(band.x) > 1 for band in bands.values()):
                plots.append(_curve_plot(section, bands, looks, kind, axis, prefix))
        for cost, metric in COSTS.items():
            rows = [row for row in section.rows if metric in row.metrics]
            if len(rows) > 1:
                plots.append(_cost_plot(rows, looks, cost, prefix))
    return plots


def _look(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[(index // len(COLOURS) + index) % len(LINES)],
    }


def _figure(extra: float = 0.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(SIZE[0], SIZE[1] + extra), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _curve_plot(
    section: Section,
    bands: Mapping[str, Band],
    looks: Mapping[str, dict[str, Any]],
    kind: str,
    axis: str,
    prefix: str,
) -> Plot:
    # The baseline and the lowest losses: rows are in that order.
    shown = {name: bands[name] for name in list(bands)[:MOST]}
    within = len(shown) <= FEW
    figure, axes = _figure(0.0 if within else 0.1 * len(shown))
    lines = []
    for i, (name, band) in enumerate(shown.items()):
        # Markers of different curves at different places, as the curves lie close together.
        every = max(1, len(band.x) // 6)
        look = looks[name] | {"markevery": (i * every // len(shown), every), "markersize": 4}
        lines += axes.plot(band.x, band.mean, linewidth=1.4, **look)
        if band.low is not None and band.high is not None:
            axes.fill_between(
                band.x, band.low, band.high, color=look["color"], alpha=0.2, linewidth=0
            )
    low, high = _limits(list(shown.values()))
    axes.set_ylim(low, high)
    if axis != "seconds":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    loss = {"val": "validation loss", "train": "training loss"}[kind]
    axes.set(xlabel=AXES[axis], ylabel=f"{loss} (nats)")
    # A label that begins with an underscore would be left out.
    labels = [_short(f" {name}" if name.startswith("_") else name) for name in shown]
    if within:
        axes.legend(lines, labels, loc="upper right", handlelength=3.5)
    else:
        figure.legend(lines, labels, loc="outside lower center", ncols=2, handlelength=3.5)
    caption = _curve_caption(shown, high, len(bands))
    return _drawn(figure, f"{prefix}loss_{axis}", f"Loss against {AXES[axis]}", caption)


def _curve_caption(shown: Mapping[str, Band], high: float, variants: int) -> str:
    seeds = sorted({band.n for band in shown.values()})
    over = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    caption = f"Mean over {over} seed{'s' * (seeds[-1] > 1)}"
    caption += " and its 95% interval." if seeds[-1] > 1 else "; one seed has no interval."
    if any((band.mean > high).any() for band in shown.values()):
        caption += " The steep beginning lies above the plot."
    if variants > len(shown):
        caption += (
            f" Of {variants} variants, the baseline and the {len(shown) - 1} with the lowest "
            "loss are drawn."
        )
    return caption


def _limits(bands: Sequence[Band]) -> tuple[float, float]:
    """From the lowest value to where the curves are after a tenth of the way."""
    longest = max(band.x[-1] for band in bands)
    late = [band.mean[band.x >= longest / 10] for band in bands]
    top = max([float(part.max()) for part in late if len(part)] or [float(bands[0].mean.max())])
    lowest = min(float(band.mean.min()) for band in bands)
    # Where a band of two seeds is wider than all the curves' course, the course is what is shown.
    ends = [float(band.low[len(band.low) // 2 :].min()) for band in bands if band.low is not None]
    bottom = max(min([lowest, *ends]), lowest - 0.5 * (top - lowest))
    room = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
    return bottom - room, top + room


def _short(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:31]}…"


def _cost_plot(
    rows: Sequence[Row], looks: Mapping[str, dict[str, Any]], cost: str, prefix: str
) -> Plot:
    figure, axes = _figure()
    metric = COSTS[cost]
    for row in rows:
        x, y, look = row.metrics[metric], row.metrics["val/loss"], looks[row.name]
        on_front = cost in row.fronts
        barred = on_front or len(rows) <= BARS
        axes.errorbar(
            x.mean,
            y.mean,
            xerr=_bars(x) if barred else None,
            yerr=_bars(y) if barred else None,
            color=look["color"],
            marker=look["marker"],
            markerfacecolor=look["color"] if on_front else "none",
            markersize=7,
            elinewidth=1,
            capsize=2,
            linestyle="none",
        )
    front = sorted(
        ((row.metrics[metric].mean, row.loss) for row in rows if cost in row.fronts),
        reverse=cost == "speed",
    )
    axes.step(*zip(*front, strict=True), where="post", color=INK, alpha=0.6, linewidth=1, zorder=1)
    if _spans_decades([row.metrics[metric].mean for row in rows]):
        axes.set_xscale("log", base=2)
    axes.margins(x=0.12, y=0.12)
    _label(axes, [(row.metrics[metric].mean, row.loss, row.name) for row in rows])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    better = "right" if cost == "speed" else "left"
    axes.set(xlabel=f"{COST_AXES[cost]} ({better} is better)", ylabel="validation loss (nats)")
    whose = "" if len(rows) <= BARS else " of those on the front"
    gain = "more tokens/s" if cost == "speed" else "a lower cost"
    caption = (
        f"Means over seeds with 95% intervals{whose}. Filled: on the Pareto front, the line, no "
        f"other variant has both a lower mean loss and {gain}."
    )
    return _drawn(figure, f"{prefix}pareto_{cost}", f"Loss against {COST_AXES[cost]}", caption)


def _bars(estimate: Any) -> list[list[float]] | None:
    if estimate.interval is None or estimate.interval[1] == estimate.interval[0]:
        return None
    half = estimate.interval[1] - estimate.mean
    return [[half], [half]]


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > 8


def _label(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, inwards, pushed up where they would overlap.

    A name that finds no room near its point is left out; the table has them all.
    """
    axes.figure.draw_without_rendering()
    box = axes.get_window_extent()
    scale = axes.figure.dpi / 72  # pixels in a point
    placed: list[tuple[float, float]] = []
    for x, y, name in sorted(points, key=lambda point: point[1]):
        px, py = axes.transData.transform((x, y))
        right = px > box.x0 + 0.6 * box.width
        up = 5 * scale
        while any(
            abs(py + up - at) < LINE * scale and abs(px - beside) < box.width / 2
            for beside, at in placed
        ):
            up += LINE * scale / 4
        if up > 3 * LINE * scale:
            continue
        placed.append((px, py + up))
        axes.annotate(
            _short(name),
            (x, y),
            xytext=(-7 if right else 7, up / scale),
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize=8.5,
        ).set_in_layout(False)


def _drawn(figure: Figure, name: str, title: str, caption: str) -> Plot:
    svg = io.StringIO()
    # The salt makes ids, and so the file, the same each time.
    with rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    png = io.BytesIO()
    FigureCanvasAgg(figure)
    # White behind it: a picture cannot know the colour of the page it is put on.
    figure.savefig(png, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return Plot(name, title, caption, adapted(svg.getvalue(), name, title), png.getvalue())
