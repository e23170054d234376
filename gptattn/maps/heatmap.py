"""Attention weights as colours and cells."""

import math

import numpy as np
from numpy.typing import NDArray

# For all weights of a page: base64 adds a third, so it stays below 10 MB.
MAX_BYTES = 7_000_000


def draw_heads(w_HTS: NDArray[np.floating], pixels: int = 4, gap: int = 6) -> NDArray[np.uint8]:
    """Return an image of the heads side by side [height, width, 3]: rows are queries, columns keys.

    Brightness is the square root of the weight, so that small weights can be seen. A token has
    `pixels` pixels, and `gap` white ones separate two heads.
    """
    H, T, S = w_HTS.shape
    image = np.full((T * pixels, H * (S * pixels + gap) - gap, 3), 255, dtype=np.uint8)
    for head in range(H):
        left = head * (S * pixels + gap)
        tile = map_to_viridis(np.sqrt(w_HTS[head].clip(0, 1)))
        image[:, left : left + S * pixels] = tile.repeat(pixels, axis=0).repeat(pixels, axis=1)
    return image


def map_to_viridis(value: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return the colours [..., 3] of values from 0, dark, to 1, yellow."""
    from matplotlib import colormaps  # a run that draws nothing does without it

    return colormaps["viridis"](value, bytes=True)[..., :3]


def choose_cell_side(tokens: int, maps: int) -> int:
    """Return the smallest cell side, in tokens, at which `maps` maps fit in MAX_BYTES."""
    side = 1
    while maps * math.comb(math.ceil(tokens / side) + 1, 2) > MAX_BYTES:
        side += 1
    return side


def keep_largest(w_HTS: NDArray[np.floating], side: int) -> NDArray[np.floating]:
    """Return the largest weight of each side x side square [H, n, n], n = T / side rounded up.

    A mean would hide a single large weight in a square.
    """
    H, T, _ = w_HTS.shape
    n = math.ceil(T / side)
    room = n * side - T
    padded_HTS = np.pad(w_HTS, ((0, 0), (0, room), (0, room)))
    return padded_HTS.reshape(H, n, side, n, side).max(axis=(2, 4))


def pack_cells(w_HTS: NDArray[np.floating], side: int) -> NDArray[np.uint8]:
    """Return the lower triangle of the cells, row by row [H, n (n + 1) / 2], as 255 * sqrt(weight).

    Rounding changes a weight by at most 0.004, and a small weight by less.
    """
    cells_HNN = keep_largest(w_HTS, side)
    scaled_HNN = np.rint(255 * np.sqrt(cells_HNN.clip(0, 1))).astype(np.uint8)
    return scaled_HNN[:, *np.tril_indices(cells_HNN.shape[1])]
