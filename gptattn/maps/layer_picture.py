"""Draws one layer as a PNG: a panel per head, with tokens on the axes."""

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import font_manager, rc_context
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from gptattn.maps.labels import shorten

COLUMNS = 4  # panels side by side
MIN, MAX = 2.3, 5.2  # limits of a panel's side in inches
PER_TOKEN = 0.13  # preferred inches per token
PER_LABEL = 0.105  # inches that a label needs
GAP, LABELS, TOP, BAR = 0.42, 1.0, 0.75, 0.75  # inches between panels, for labels, title, colours
# The first comes with matplotlib, so pictures look the same everywhere. The others, if installed,
# have characters that it lacks, such as Chinese.
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Microsoft YaHei", "Arial Unicode MS")
STYLE: dict[Any, Any] = {"text.parse_math": False, "font.size": 8}


def draw_layer(
    w_HTS: NDArray[np.floating], labels: Sequence[str], titles: Sequence[str], title: str
) -> bytes:
    """Return a PNG of one layer's weights [H, T, T]: a panel per head, rows queries, columns keys.

    Keys that a query cannot see are white; colour shows the square root of the weight. Axes that
    are too short for all labels show every n-th, with the token's number.
    """
    H, T, _ = w_HTS.shape
    columns, rows = min(H, COLUMNS), math.ceil(H / COLUMNS)
    side = min(max(PER_TOKEN * T, MIN), MAX)
    width = LABELS + columns * side + (columns - 1) * GAP + BAR
    height = TOP + rows * side + (rows - 1) * GAP + LABELS
    every = math.ceil(T * PER_LABEL / side)
    shown = range(0, T, every)
    names = [shorten(labels[i]) for i in shown]
    if every > 1:
        names = [f"{i} {name}" for i, name in zip(shown, names, strict=True)]
    seen_HTS = np.where(np.tri(T, dtype=bool), w_HTS, np.nan)
    fonts = [font for font in FONTS if font in font_manager.get_font_names()]
    with rc_context({**STYLE, "font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box
        figure = Figure(figsize=(width, height))
        figure.text(0.15 / width, 1 - 0.3 / height, title, fontsize=10)
        norm = PowerNorm(0.5, 0, 1)
        colours = ScalarMappable(norm, "viridis")
        for head in range(H):
            row, column = divmod(head, COLUMNS)
            left = LABELS + column * (side + GAP)
            bottom = height - TOP - side - row * (side + GAP)
            axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
            axes.imshow(seen_HTS[head], colours.cmap, norm)
            axes.set_title(titles[head], fontsize=8, pad=4)
            last = head + COLUMNS >= H  # the lowest panel of its column
            axes.set_xticks(shown if last else [], names if last else [], rotation=90)
            axes.set_yticks(*((shown, names) if column == 0 else ([], [])))
            axes.tick_params(length=2, labelsize=6.5)
            axes.set_frame_on(False)
        place = ((width - BAR + 0.2) / width, 1 - (TOP + side) / height, 0.1 / width, side / height)
        bar = figure.colorbar(colours, cax=figure.add_axes(place), ticks=[0, 0.05, 0.2, 0.5, 1])
        bar.ax.tick_params(length=2, labelsize=6.5)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()
