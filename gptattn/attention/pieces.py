"""A window's queries in blocks, each with the keys that it sees: rows of one call."""

from typing import NamedTuple

import torch
from torch import Tensor

TOGETHER = 2048  # queries of all rows in one call with a window; what it copies stays small
BLOCK = 64  # queries in a block, at least


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


def pieces_of(B: int, T: int, S: int, band: Band | None) -> list[Piece]:
    """Return the calls of the operator that T queries and S keys need."""
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
