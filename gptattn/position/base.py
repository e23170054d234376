"""Two places where a position can enter a model: its input, or each attention's heads."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

# The position of the first token given: one for all rows, or [batch] for rows padded on the left.
Offset = int | Tensor


def places(offset: Offset, T: int) -> slice | Tensor:
    """Where a table by position is read for T tokens from `offset` on: a slice, or [B, T].

    Padding lies before position 0, and reads that place: nobody looks at it.
    """
    if isinstance(offset, int):
        return slice(offset, offset + T)
    return (offset[:, None] + torch.arange(T, device=offset.device)).clamp_min(0)


class InputPosition(nn.Module, ABC):
    """Acts once, on the token embeddings."""

    @abstractmethod
    def forward(self, x_BTE: Tensor, offset: Offset) -> Tensor:
        """x [B, T, E] of tokens that start at `offset`, with their positions in it."""


class HeadPosition(nn.Module, ABC):
    """Acts in every attention layer, on queries and keys. Shared by all layers: no parameters."""

    @abstractmethod
    def rotate(self, q_BHTD: Tensor, k_BGTD: Tensor, offset: Offset) -> tuple[Tensor, Tensor]:
        """Queries and keys of tokens that start at `offset`, with their positions in them."""
