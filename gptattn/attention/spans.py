"""Positions of the queries and keys in one call of `attend`, and blocks of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gptattn.position.base import Documents, Positions


@dataclass(frozen=True)
class Span:
    """A contiguous block of the queries, or of the keys, that `attend` was given.

    Its tensors broadcast over [B, H, T, S], so a bias is plain arithmetic: that of ALiBi is
    `slope_H11 * (key.pos - query.pos)`.
    """

    positions: Positions  # of all queries, or of all keys
    where: slice  # the n of them in this block
    across: int  # the axis of size 1: -1 for queries, -2 for keys
    device: torch.device

    @property
    def pos(self) -> Tensor:
        """Positions [B or 1, 1, n, 1] of queries, [B or 1, 1, 1, n] of keys; -1: no token.

        Of rows of several documents, each token's position in its document.
        """
        if isinstance(self.positions, range):
            first = self.positions.start
            start, stop = first + self.where.start, first + self.where.stop
            return self._across(torch.arange(start, stop, device=self.device))
        positions = self.positions
        if isinstance(positions, Documents):
            positions = positions.position_BT
        return self._across(positions[..., self.where])

    @property
    def document(self) -> Tensor | None:
        """Where in its row each token's document begins, shaped as `pos`; None: a row is one."""
        if isinstance(self.positions, Documents):
            return self._across(self.positions.start_BT[..., self.where])
        return None

    def _across(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 1, x.shape[-1]).unsqueeze(self.across)

    def of(self, x_BHN: Tensor) -> Tensor:
        """Return this block's part of x, which has one value per query (or key) of `attend`.

        B and H may be 1. The shape is [B, H, n, 1] for queries, [B, H, 1, n] for keys.
        """
        return x_BHN[..., self.where].unsqueeze(self.across)


class Standing:
    """The positions of T queries and S keys. Raises ValueError if the counts differ.

    documents: those of the rows, if there are several in a row; queries and keys share them.
    known: the places in a row are ranges, and the keys include each query's own, so that it sees at
    least one.
    newest: known, and no key comes after the last query.
    same: known, and T = S, so queries and keys have the same positions.
    ahead: if known, the number of keys before the first query's own; otherwise 0.
    """

    def __init__(
        self, q_pos: Positions | None, k_pos: Positions | None, T: int, S: int, device: torch.device
    ) -> None:
        if T != S and (q_pos is None or k_pos is None):
            raise ValueError(
                f"{T} queries and {S} keys need q_pos and k_pos, to know which keys each query sees"
            )
        self.q_pos, self.k_pos = _of(q_pos, T, "q_pos"), _of(k_pos, S, "k_pos")
        self.T, self.S, self.device = T, S, device
        self.known, self.newest, self.ahead = False, False, 0
        self.documents = self.q_pos if isinstance(self.q_pos, Documents) else None
        if self.documents is not self.k_pos and Documents in map(type, (self.q_pos, self.k_pos)):
            raise ValueError("queries and keys in documents need the same q_pos and k_pos")
        # Neither len() nor slices of ranges: torch.compile has none for an unknown end.
        if isinstance(self.q_pos, range) and isinstance(self.k_pos, range):
            before = self.q_pos.start - self.k_pos.start
            self.known = before >= 0 and self.q_pos.stop <= self.k_pos.stop
            self.newest = self.known and self.q_pos.stop == self.k_pos.stop
            self.ahead = before if self.known else 0
        elif self.documents is not None:
            self.known = self.newest = True
        self.same = self.known and T == S

    def whole(self) -> tuple[Span, Span]:
        """Return all queries and all keys."""
        return self._pair(slice(0, self.T), slice(0, self.S))

    def blocks(self, size: int, window: int | None) -> Iterator[tuple[Span, Span]]:
        """Yield `size` queries at a time, with the keys that at least one of them may see.

        If the positions are not `known`, every block gets all keys.
        """
        for start in range(0, max(self.T, 1), size):
            queries = slice(start, min(start + size, self.T))
            yield self._pair(queries, self._seen(queries, window))

    def sees_all(self, window: int | None) -> bool:
        """Whether a single query is known to see every key that `blocks` leaves it.

        In a full ring that takes a look at the positions, which is cheaper than a mask; not on a
        GPU, where the host would wait.
        """
        if self.T != 1 or self.newest or not isinstance(self.q_pos, range):
            return self.T == 1 and self.newest
        if not isinstance(self.k_pos, Tensor) or self.device.type != "cpu" or self.S == 0:
            return False
        first, last = (int(x) for x in torch.aminmax(self.k_pos))
        q = self.q_pos.start
        return last <= q and first >= (0 if window is None else max(0, q - window + 1))

    def _seen(self, queries: slice, window: int | None) -> slice:
        if not self.known:
            return slice(0, self.S)
        first = 0 if window is None else max(0, self.ahead + queries.start - window + 1)
        return slice(max(first, self._earliest(queries)), self.ahead + queries.stop)

    def _earliest(self, queries: slice) -> int:
        """Return where the first document of these queries begins, if the host can know at once."""
        if self.documents is None or self.device.type != "cpu" or torch.compiler.is_compiling():
            return 0
        start_BT = self.documents.start_BT
        if not start_BT.numel():
            return 0
        return int(start_BT[:, queries.start].min())

    def _pair(self, queries: slice, keys: slice) -> tuple[Span, Span]:
        query = Span(self.q_pos, queries, -1, self.device)
        return query, Span(self.k_pos, keys, -2, self.device)


def _of(positions: Positions | None, count: int, name: str) -> Positions:
    if positions is None:
        return range(count)
    if isinstance(positions, range) and (positions.step != 1 or positions.start < 0):
        raise ValueError(f"{name}={positions} must go up by one, from 0 or more")
    if isinstance(positions, range):
        given = positions.stop - positions.start
    elif isinstance(positions, Documents):
        given = positions.start_BT.shape[1]
    else:
        given = positions.shape[-1]
    if given != count:
        raise ValueError(f"{name} has {given} positions for {count} tokens")
    return positions
