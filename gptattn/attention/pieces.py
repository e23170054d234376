"""Queries in blocks, each with the keys that it sees, for windows and for rows of documents."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOGETHER = 2048  # queries of all rows in one call with a window; what it copies stays small
BLOCK = 64  # queries in a block, at least
MOST = 128  # queries in a block of rows of documents


class Band(NamedTuple):
    """Query t sees the keys up to `ahead` + t, with a window only the newest of these."""

    window: int | None
    ahead: int


class Piece(NamedTuple):
    """Queries from `query` on in `count` blocks of C; L keys from `key` on, C later per block."""

    query: int
    key: int
    count: int
    C: int
    L: int

    def queries(self, x_BHTD: Tensor) -> Tensor:
        """Return a block of queries per row: [B * count, H, C, D]."""
        x_BHND = x_BHTD[:, :, self.query : self.query + self.count * self.C]
        return x_BHND.unflatten(2, (self.count, self.C)).transpose(1, 2).flatten(0, 1)

    def keys(self, x_BGSD: Tensor) -> Tensor:
        """Return a block's keys per row: [B * count, G, L, D]; with B = 1 a view."""
        x_BGND = x_BGSD[:, :, self.key : self.key + (self.count - 1) * self.C + self.L]
        return x_BGND.unfold(2, self.L, self.C).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def queries_put(self, x_BHTD: Tensor, rows_XHCD: Tensor) -> None:
        """Write what has the shape of `queries` to its place."""
        x_BHND = x_BHTD[:, :, self.query : self.query + self.count * self.C]
        rows_BHnCD = rows_XHCD.unflatten(0, (-1, self.count)).transpose(1, 2)
        x_BHND.unflatten(2, (self.count, self.C)).copy_(rows_BHnCD)

    def keys_add(self, total_BGSD: Tensor, more_XGLD: Tensor) -> None:
        """Add what has the shape of `keys`, where neighbours overlap, to its places."""
        # Not through `unfold`: compiled, adding to such a view is silently lost.
        for block, more_BGLD in enumerate(more_XGLD.unflatten(0, (-1, self.count)).unbind(1)):
            start = self.key + block * self.C
            total_BGSD[:, :, start : start + self.L].add_(more_BGLD)

    def limits(self, band: Band, like: Tensor) -> Tensor | None:
        """Return what is added to scores, [1, 1, C, L]; None: a query sees the keys up to its own.

        The last query of a block sees its last key.
        """
        if self.C == self.L and (band.window is None or band.window >= self.C):
            return None
        ahead = self.L - self.C
        seen = torch.ones(self.C, self.L, dtype=torch.bool, device=like.device).tril(ahead)
        if band.window is not None:
            seen = seen.triu(ahead - band.window + 1)
        return like.new_zeros(1, 1, self.C, self.L).masked_fill(~seen, -torch.inf)


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


def pieces_of(
    B: int, T: int, S: int, band: Band | None, start_BT: Tensor | None = None
) -> Sequence[Piece | Stretch]:
    """Return the calls of the operator that T queries and S keys need.

    start_BT: where in its row each token's document begins; T = S then, and none are ahead.
    """
    if start_BT is not None:
        assert band is not None
        return list(_in_documents(start_BT, band.window))
    if band is None:
        return [Piece(0, 0, 1, T, S)]
    window, ahead = band
    # Queries whose window reaches back to the first key, or beyond it, are not limited by it.
    t = T if window is None else min(T, max(0, window - ahead))
    pieces = [Piece(0, 0, 1, t, ahead + t)] if t else []
    while window is not None and t < T:
        # Blocks of half a window do a quarter more work than is seen.
        C = min(T - t, max(BLOCK, -(-window // 32) * 16))
        count = max(1, min(TOGETHER // (B * C), (T - t) // C))
        pieces.append(Piece(t, ahead + t - window + 1, count, C, window - 1 + C))
        t += count * C
    return pieces


def _in_documents(start_BT: Tensor, window: int | None) -> Iterator[Stretch]:
    """Yield blocks of queries, rows together whose keys begin at about the same place."""
    B, T = start_BT.shape
    rows = range(B)
    if T > MOST and window is None:
        whole, rows = _split([last == 0 for last in start_BT[:, -1].tolist()])
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


def _split(which: list[bool]) -> tuple[list[int], list[int]]:
    """Return the numbers of the true ones, and those of the others."""
    yes, no = [], []
    for n, one in enumerate(which):
        (yes if one else no).append(n)
    return yes, no


def _rows(some: list[int], start_BT: Tensor) -> Tensor | None:
    """Return these rows as an index; None for all."""
    if len(some) == len(start_BT):
        return None
    return torch.tensor(some, device=start_BT.device)
