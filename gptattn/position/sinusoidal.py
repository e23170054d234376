"""Sinusoidal absolute positions, as in the original Transformer."""

import torch
from torch import Tensor

from gptattn.position.base import InputPosition, Positions, table_index


class SinusoidalPosition(InputPosition):
    """Token embedding * sqrt(d_model) + sines and cosines of the position; nothing is trained.

    Number 2i of position p is sin(p / 10000^(2i / d_model)), number 2i + 1 its cosine. The paper
    has the factor; without it, embeddings drawn from N(0, 0.02) would drown in the sines.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.4 (the factor) and 3.5.
    """

    table_TE: Tensor

    def __init__(self, context_length: int, d_model: int) -> None:
        super().__init__()
        self.factor = d_model**0.5
        # Angles in float64, because in float32 they are already off by 1e-4 at position 1,000.
        frequency = 10_000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        angle = torch.outer(torch.arange(context_length, dtype=torch.float64), frequency)
        # An odd width ends in a sine without its cosine.
        table_TE = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model]
        self.register_buffer("table_TE", table_TE.float(), persistent=False)

    def forward(self, x_BTE: Tensor, positions: Positions) -> Tensor:
        return x_BTE * self.factor + self.table_TE[table_index(positions)].to(x_BTE.dtype)
