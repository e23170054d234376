"""Weights made smaller: squares of token pairs share a cell, and a byte holds its weight."""

import math

import numpy as np
from numpy.typing import NDArray

BYTES = 7_000_000  # of all a page's weights; a third more as base64: the page stays below 10 MB


def tokens_per_cell(tokens: int, maps: int) -> int:
    """The side of the square of token pairs that share a cell, so that all maps fit in BYTES."""
    side = 1
    while maps * math.comb(math.ceil(tokens / side) + 1, 2) > BYTES:
        side += 1
    return side


def largest(w_HTS: NDArray[np.floating], side: int) -> NDArray[np.floating]:
    """The largest weight of each side x side square [H, n, n], n = T / side rounded up.

    A mean would hide the one weight in a square that matters.
    """
    H, T, _ = w_HTS.shape
    n = math.ceil(T / side)
    room = n * side - T
    padded_HTS = np.pad(w_HTS, ((0, 0), (0, room), (0, room)))
    return padded_HTS.reshape(H, n, side, n, side).max(axis=(2, 4))


def packed(w_HTS: NDArray[np.floating], side: int) -> NDArray[np.uint8]:
    """The lower triangle of the cells, row by row [H, n (n + 1) / 2], each 255 times its root.

    That is off by at most 0.004 in the weight, and by less where it is small.
    """
    cells_HNN = largest(w_HTS, side)
    scaled_HNN = np.rint(255 * np.sqrt(cells_HNN.clip(0, 1))).astype(np.uint8)
    return scaled_HNN[:, *np.tril_indices(cells_HNN.shape[1])]
