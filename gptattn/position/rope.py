"""Rotary positions (RoPE), half-split pairs."""

import torch
from torch import Tensor

from gptattn.position.base import HeadPosition, Positions, table_index


class RotaryPosition(HeadPosition):
    """Rotates the pair (x[i], x[i + D/2]) of a query or key at position p by p * base^(-2i/D).

    The half-split pairing is Llama's; the paper pairs neighbours, which is the same up to a
    permutation of the weights. Raises ValueError for an odd head_dim or a base that is not
    positive.

    Source: Su et al. 2021, arXiv:2104.09864, sec. 3.2.
    """

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, context_length: int, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} must be even for rotary positions")
        if not 0 < base < float("inf"):
            raise ValueError(f"base={base} must be a positive number; 10000.0 is the paper's")
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.base = base
        angle_TD = torch.outer(torch.arange(context_length, dtype=torch.float64), frequency)
        angle_TD = torch.cat([angle_TD, angle_TD], dim=-1)
        # In float64, because float32 angles are off by 1e-4 at position 1,000 already.
        self.register_buffer("cos_TD", angle_TD.cos(), persistent=False)
        self.register_buffer("sin_TD", angle_TD.sin(), persistent=False)

    def rotate(self, q_BHTD: Tensor, k_BGTD: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        where = table_index(positions)
        cos, sin = self.cos_TD[where].to(q_BHTD.dtype), self.sin_TD[where].to(q_BHTD.dtype)
        if cos.ndim == 3:  # [B, T, D]: the same for all heads
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _turn(q_BHTD, cos, sin), _turn(k_BGTD, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
