"""Attention weights as colours and cells."""

import numpy as np
from numpy.typing import NDArray


def draw_heads(w_HTS: NDArray[np.floating], pixels: int = 4, gap: int = 6) -> NDArray[np.uint8]:
    """Return an image of the heads side by side [height, width, 3]: rows are queries, columns keys.

    Brightness is the square root of the weight, which makes small weights visible. Each token takes
    `pixels` pixels, and `gap` white ones separate two heads.
    """
    tiles = map_to_viridis(np.sqrt(w_HTS.clip(0, 1))).repeat(pixels, axis=1).repeat(pixels, axis=2)
    apart = np.pad(tiles, ((0, 0), (0, 0), (0, gap), (0, 0)), constant_values=255)
    return np.hstack([*apart])[:, :-gap]


def map_to_viridis(value: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return the colours [..., 3] of values from 0, dark, to 1, yellow."""
    from matplotlib import colormaps  # not needed by a run that draws nothing

    return colormaps["viridis"](value, bytes=True)[..., :3]


def pack_cells(w_HTS: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return the lower triangle of the weights, row by row [H, T (T + 1) / 2], as 255 * sqrt.

    Rounding changes a weight by at most 0.004, and small weights by less.
    """
    scaled_HTS = np.rint(255 * np.sqrt(w_HTS.clip(0, 1))).astype(np.uint8)
    return scaled_HTS[:, *np.tril_indices(w_HTS.shape[1])]
