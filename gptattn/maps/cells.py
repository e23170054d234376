"""Reduces attention weights for a page: a cell is a square of token pairs, its weight one byte."""

import math

import numpy as np
from numpy.typing import NDArray

BYTES = 7_000_000  # for all weights of a page; base64 adds a third, so it stays below 10 MB


def tokens_per_cell(tokens: int, maps: int) -> int:
    """Return the smallest side of a cell, in tokens, with which `maps` maps fit in BYTES."""
    side = 1
    while maps * math.comb(math.ceil(tokens / side) + 1, 2) > BYTES:
        side += 1
    return side


def largest(w_HTS: NDArray[np.floating], side: int) -> NDArray[np.floating]:
    """Return the largest weight of each side x side square [H, n, n], n = T / side rounded up.

    A mean would hide a single large weight in a square.
    """
    H, T, _ = w_HTS.shape
    n = math.ceil(T / side)
    room = n * side - T
    padded_HTS = np.pad(w_HTS, ((0, 0), (0, room), (0, room)))
    return padded_HTS.reshape(H, n, side, n, side).max(axis=(2, 4))


def packed(w_HTS: NDArray[np.floating], side: int) -> NDArray[np.uint8]:
    """Return the lower triangle of the cells, row by row [H, n (n + 1) / 2], as 255 * sqrt(weight).

    Rounding changes a weight by at most 0.004, and a small weight by less.
    """
    cells_HNN = largest(w_HTS, side)
    scaled_HNN = np.rint(255 * np.sqrt(cells_HNN.clip(0, 1))).astype(np.uint8)
    return scaled_HNN[:, *np.tril_indices(cells_HNN.shape[1])]
