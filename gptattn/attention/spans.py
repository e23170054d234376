"""Where the queries and keys of one call of `attend` stand, and blocks of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gptattn.position.base import Positions


@dataclass(frozen=True)
class Span:
    """Neighbouring queries, or keys, out of those that `attend` was given.

    What it gives has the axes [B, H, T, S], with size 1 where it is the same along one, so that a
    bias is plain arithmetic. That of ALiBi is `slope_H11 * (key.pos - query.pos)`.
    """

    positions: Positions  # of all
    where: slice  # these n of them
    across: int  # the axis along which they are the same: -1 for queries, -2 for keys
    device: torch.device

    @property
    def pos(self) -> Tensor:
        """[B or 1, 1, n, 1] of queries, [B or 1, 1, 1, n] of keys; -1 is not there."""
        if isinstance(self.positions, range):
            known = self.positions[self.where]
            part = torch.arange(known.start, known.stop, device=self.device)
        else:
            part = self.positions[..., self.where]
        return part.reshape(-1, 1, part.shape[-1]).unsqueeze(self.across)

    def of(self, x_BHN: Tensor) -> Tensor:
        """Their part of x, which has a value for each query, or key, that `attend` was given.

        B and H may be 1. [B, H, n, 1] of queries, [B, H, 1, n] of keys.
        """
        return x_BHN[..., self.where].unsqueeze(self.across)


class Standing:
    """The positions of T queries and S keys. Raises ValueError where their numbers are others.

    `known`: the host knows them, and every query has its own key, so that it sees one at least.
    `newest`: known, and no key comes after the last query. `same`: nor are there other keys.
    """

    def __init__(
        self, q_pos: Positions | None, k_pos: Positions | None, T: int, S: int, device: torch.device
    ) -> None:
        if T != S and (q_pos is None or k_pos is None):
            raise ValueError(f"{T} queries and {S} keys need q_pos and k_pos, to be told apart")
        self.q_pos, self.k_pos = _of(q_pos, T, "q_pos"), _of(k_pos, S, "k_pos")
        self.T, self.S, self.device = T, S, device
        self.known = (
            isinstance(self.q_pos, range)
            and isinstance(self.k_pos, range)
            and self.k_pos.start <= self.q_pos.start
            and self.q_pos.stop <= self.k_pos.stop
        )
        self.newest = self.known and self.q_pos[-1:] == self.k_pos[-1:]
        self.same = self.known and T == S

    def whole(self) -> tuple[Span, Span]:
        """All queries and all keys."""
        return self._pair(slice(0, self.T), slice(0, self.S))

    def blocks(self, size: int, window: int | None) -> Iterator[tuple[Span, Span]]:
        """`size` queries at a time, each with the keys that one of them may see.

        Keys that none can see are left out where the host knows; elsewhere all are there.
        """
        for start in range(0, max(self.T, 1), size):
            queries = slice(start, min(start + size, self.T))
            yield self._pair(queries, self._seen(queries, window))

    def _seen(self, queries: slice, window: int | None) -> slice:
        if not (self.known and isinstance(self.q_pos, range) and isinstance(self.k_pos, range)):
            return slice(0, self.S)
        ahead = self.q_pos.start - self.k_pos.start
        first = 0 if window is None else max(0, ahead + queries.start - window + 1)
        return slice(first, ahead + queries.stop)

    def _pair(self, queries: slice, keys: slice) -> tuple[Span, Span]:
        query = Span(self.q_pos, queries, -1, self.device)
        return query, Span(self.k_pos, keys, -2, self.device)


def _of(positions: Positions | None, count: int, name: str) -> Positions:
    if positions is None:
        return range(count)
    if isinstance(positions, range) and (positions.step != 1 or positions.start < 0):
        raise ValueError(f"{name}={positions} must go up by one, from 0 or more")
    given = len(positions) if isinstance(positions, range) else positions.shape[-1]
    if given != count:
        raise ValueError(f"{name} has {given} positions for {count} tokens")
    return positions
