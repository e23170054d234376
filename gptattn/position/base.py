"""Two places where a position can enter a model: its input, or each attention's heads."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

# Of tokens in a row: a range, which the host knows, the same for all rows; or [T] or [B, T] int64,
# where -1 holds no token, as in rows that are padded on the left.
Positions = range | Tensor


def places(positions: Positions) -> slice | Tensor:
    """Where a table by position is read: a slice, or indices of the positions' own shape.

    What holds no token reads place 0: nobody looks at it.
    """
    if isinstance(positions, range):
        return slice(positions.start, positions.stop)
    return positions.clamp_min(0)


class InputPosition(nn.Module, ABC):
    """Acts once, on the token embeddings."""

    @abstractmethod
    def forward(self, x_BTE: Tensor, positions: Positions) -> Tensor:
        """x [B, T, E] of tokens at these positions, with the positions in it."""


class HeadPosition(nn.Module, ABC):
    """Acts in every attention layer, on queries and keys. Shared by all layers: no parameters."""

    @abstractmethod
    def rotate(self, q_BHTD: Tensor, k_BGTD: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Queries and keys of tokens at these positions, with the positions in them."""
