"""The two places where positions can enter a model: its input, or the heads of each attention."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Documents:
    """Positions in rows that hold several documents, or parts of them, and keep them apart.

    start_BT: the index in the row where each token's document begins. Positions count from there.
    """

    start_BT: Tensor

    @classmethod
    def numbered(cls, number_BT: Tensor) -> "Documents":
        """Return the positions for rows where each run of equal numbers is one document."""
        begins_BT = F.pad(number_BT[:, 1:] != number_BT[:, :-1], (1, 0))
        place_T = torch.arange(number_BT.shape[1], device=number_BT.device)
        return cls((begins_BT * place_T).cummax(dim=1).values)

    @property
    def position_BT(self) -> Tensor:
        """The position of each token in its document."""
        T = self.start_BT.shape[1]
        return torch.arange(T, device=self.start_BT.device) - self.start_BT

    @cached_property
    def bounds(self) -> Tensor:
        """Where documents begin in all rows, joined end to end, and where the last one ends."""
        with torch.inference_mode(False):  # training can reuse validation's
            begins = (self.position_BT == 0).flatten().nonzero()[:, 0]  # the host waits here
            return F.pad(begins, (0, 1), value=self.start_BT.numel())


# Token positions: a range, known on the host and the same for all rows; or int64 [T] or [B, T],
# with -1 for an entry without a token, as in left padding; or `Documents`.
Positions = range | Tensor | Documents


def table_index(positions: Positions) -> slice | Tensor:
    """Return how to index a table by position: with a slice, or a tensor shaped like `positions`.

    An entry without a token reads row 0, and no query sees it.
    """
    if isinstance(positions, range):
        return slice(positions.start, positions.stop)
    if isinstance(positions, Documents):
        return positions.position_BT
    return positions.clamp_min(0)


class InputPosition(nn.Module, ABC):
    """A position encoding that acts once, on the token embeddings."""

    @abstractmethod
    def forward(self, x_BTE: Tensor, positions: Positions) -> Tensor:
        """Return x [B, T, E] with the positions encoded in it."""


class HeadPosition(nn.Module):
    """A position encoding that acts in every layer, on queries and keys or on their scores.

    Layers with the same heads share one, so it has no parameters. A subclass overrides `rotate` and
    sets `rotates`, or overrides `decay` and sets `decays`.
    """

    rotates: ClassVar[bool] = False  # whether `rotate` changes anything
    decays: ClassVar[bool] = False  # whether `decay` is added to the scores

    def resized(self, head_dim: int) -> "HeadPosition":
        """Return this encoding for heads of another size. Raises ValueError if that is impossible.

        For attentions where positions act on part of a head, or on heads of another size.
        """
        return self

    def rotate(self, q_BHTD: Tensor, k_BGTD: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return queries and keys with the positions encoded in them, in the same shapes."""
        return q_BHTD, k_BGTD

    def decay(self, positions: Positions) -> Tensor:
        """Return c [B or 1, H, N]; each score gets its query's c minus its key's c added."""
        raise AssertionError(f"{type(self).__name__} does not decay")
