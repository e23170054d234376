"""Two places where a position can enter a model: its input, or each attention's heads."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class InputPosition(nn.Module, ABC):
    """Acts once, on the token embeddings."""

    @abstractmethod
    def forward(self, x_BTE: Tensor, offset: int) -> Tensor:
        """x [B, T, E] of tokens that start at `offset`, with their positions in it."""


class HeadPosition(nn.Module, ABC):
    """Acts in every attention layer, on queries and keys. Shared by all layers: no parameters."""

    @abstractmethod
    def rotate(self, q_BHTD: Tensor, k_BGTD: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Queries and keys of tokens that start at `offset`, with their positions in them."""
