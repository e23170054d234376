"""What all plots share: colours, legend, ticks, and rendering to SVG and PNG."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from gptattn.compare.chart import Chart
from gptattn.compare.svg import INK, adapted

# Okabe and Ito 2008, Color Universal Design: safe for any colour vision. Yellow and black are left
# out: one vanishes on a light background, the other on a dark one.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
MOST = 12  # variants in a legend; with more, their looks are hard to tell apart
SIZE = (5.2, 3.7)  # inches; the text stays legible at a width of 360 pixels
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
    """One figure as SVG and PNG, with its title and caption; `chart` makes it interactive."""

    name: str  # of its files, without suffix
    title: str
    caption: str
    svg: str
    png: bytes
    chart: Chart | None = None


def look(index: int) -> dict[str, Any]:
    """Return matplotlib's colour, marker and line style for the variant at `index`."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[(index // len(COLOURS) + index) % len(LINES)],
    }


def line_look(look: Mapping[str, Any]) -> dict[str, Any]:
    """Return a look as a chart's Series has it: its colour, and its dashes in pixels."""
    dashes = () if look["linestyle"] == "-" else look["linestyle"][1]
    return {"color": look["color"], "dash": [1.6 * length for length in dashes]}


def new_figure(extra: float = 0.0) -> tuple[Figure, Any]:
    """Return a figure of the common style and its axes; `extra` inches are added to its height."""
    figure = Figure(figsize=(SIZE[0], SIZE[1] + extra), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def tick(value: float, position: int | None = None) -> str:
    """Format a tick label: `512`, `16,384`, `20k`, `7T`."""
    exact = abs(value) < 1e5 and value % 1000
    return f"{value:,.5g}" if exact else EngFormatter(sep="")(value, position)


def scale_x(axes: Any, values: Sequence[float], base: int = 10) -> None:
    """Format the x axis; use a log scale if the values, all positive, span more than 8 times."""
    if wide(values):
        log_x(axes, base)
    axes.xaxis.set_major_formatter(tick)


def log_x(axes: Any, base: int = 10) -> None:
    """Use a log scale, with ticks at 1, 2, 5 for base 10, and at powers of two for base 2."""
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(tick)


def wide(values: Sequence[float]) -> bool:
    """Whether the values, all positive, span more than 8 times: a log scale shows them better."""
    return min(values) > 0 and max(values) / min(values) > 8


def short(name: str) -> str:
    """Cut a name to 32 characters."""
    return name if len(name) <= 32 else f"{name[:31]}…"


def legend_below(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Put a legend below the plot. The figure must be `room_below(names)` inches higher."""
    # matplotlib leaves out labels that begin with an underscore.
    labels = [short(f" {name}" if name.startswith("_") else name) for name in names]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=_columns(names), handlelength=3.5
    )


def room_below(names: Sequence[str]) -> float:
    """Return the height in inches of a legend with these names, below the plot."""
    return 0.2 * math.ceil(len(names) / _columns(names))


def _columns(names: Sequence[str]) -> int:
    """Return how many legend columns fit into the figure's width."""
    longest = max(len(short(name)) for name in names)
    return 3 if longest <= 10 else 2 if longest <= 22 else 1


def drawn(figure: Figure, name: str, title: str, caption: str, chart: Chart | None = None) -> Plot:
    """Render the figure to SVG and PNG; `chart` holds the same data for the page."""
    svg = io.StringIO()
    # A fixed salt makes the ids, and so the file, the same each time.
    with rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    # Laying out takes longer than drawing, so both have the layout of the first.
    figure.set_layout_engine("none")
    png = io.BytesIO()
    # A PNG needs a background: its text stays dark on a dark page.
    figure.set(dpi=200, facecolor="white")
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    adapted_svg = adapted(svg.getvalue(), name, title)
    return Plot(name, title, caption, adapted_svg, png.getvalue(), chart)
