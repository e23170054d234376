"""Queries of rows of documents in blocks, each with the keys from its first document on."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gptattn.attention.pieces import BLOCK, Band

MOST = 128  # queries in a block


class Stretch(NamedTuple):
    """Queries of some rows, with the keys from the earliest document of the first of them on.

    start_XC: where the document of each of these queries begins; None: each row is one document.
    """

    rows_X: Tensor | None  # None: all
    query: slice
    key: slice
    start_XC: Tensor | None

    def queries(self, x_BHTD: Tensor) -> Tensor:
        """Return the queries, or what there is of each: [X, H, C, D]."""
        return self._of(x_BHTD[:, :, self.query])

    def keys(self, x_BGSD: Tensor) -> Tensor:
        """Return the keys, or what there is of each: [X, G, L, D]."""
        return self._of(x_BGSD[:, :, self.key])

    def _of(self, x: Tensor) -> Tensor:
        return x if self.rows_X is None else x[self.rows_X]

    def queries_put(self, x_BHTD: Tensor, rows_XHCD: Tensor) -> None:
        """Write what has the shape of `queries` to its place."""
        place = x_BHTD[:, :, self.query]
        if self.rows_X is None:
            place.copy_(rows_XHCD)
        else:
            place.index_copy_(0, self.rows_X, rows_XHCD)

    def keys_add(self, total_BGSD: Tensor, more_XGLD: Tensor) -> None:
        """Add what has the shape of `keys` to its place."""
        place = total_BGSD[:, :, self.key]
        if self.rows_X is None:
            place.add_(more_XGLD)
        else:
            place.index_add_(0, self.rows_X, more_XGLD)

    def limits(self, band: Band, like: Tensor) -> Tensor | None:
        """Return what is added to scores, [X, 1, C, L]; None: a query sees the keys up to its own.

        The last query sees the last key.
        """
        if self.start_XC is None:
            return None
        q_C1 = torch.arange(self.query.start, self.query.stop, device=like.device)[:, None]
        k_L = torch.arange(self.key.start, self.key.stop, device=like.device)
        hidden_XCL = (k_L < self.start_XC[:, :, None]) | (k_L > q_C1)
        if band.window is not None:
            hidden_XCL |= k_L <= q_C1 - band.window
        mask_XCL = like.new_zeros(hidden_XCL.shape).masked_fill_(hidden_XCL, -torch.inf)
        return mask_XCL[:, None]


def stretches_of(start_BT: Tensor, window: int | None) -> Iterator[Stretch]:
    """Yield the calls of the operator that rows of documents need; they are in the host's memory.

    start_BT: where in its row each token's document begins. Rows of one document go together, and
    of the others, block by block, those whose keys begin at about the same place.
    """
    B, T = start_BT.shape
    rows = list(range(B))
    if T > MOST and window is None:
        last_B = start_BT[:, -1].tolist()
        whole, rows = [b for b in rows if last_B[b] == 0], [b for b in rows if last_B[b] > 0]
        if whole:
            yield Stretch(_rows(whole, start_BT), slice(0, T), slice(0, T), None)
    C = MOST if window is None else min(MOST, max(BLOCK, -(-window // 32) * 16))
    firsts_BN = start_BT[:, ::C].tolist()
    for n, first in enumerate(range(0, T, C)):
        queries = slice(first, min(first + C, T))
        nearest = 0 if window is None else first - window + 1
        together: dict[int, list[int]] = {}  # block of the first key -> rows
        for row in rows:
            together.setdefault(max(firsts_BN[row][n], nearest) // C, []).append(row)
        for some in together.values():
            key = min(max(firsts_BN[row][n], nearest) for row in some)
            rows_X = _rows(some, start_BT)
            start_BC = start_BT[:, queries]
            start_XC = start_BC if rows_X is None else start_BC[rows_X]
            yield Stretch(rows_X, queries, slice(key, queries.stop), start_XC)


def _rows(some: list[int], start_BT: Tensor) -> Tensor | None:
    """Return these rows as an index; None for all."""
    if len(some) == len(start_BT):
        return None
    return torch.tensor(some, device=start_BT.device)
