"""Learned absolute positions, as in GPT-2."""

import torch
from torch import Tensor, nn

from gptattn.position.base import InputPosition, Positions, table_index


class LearnedPosition(InputPosition):
    """One trained vector per position, added to the token embedding.

    Source: Radford et al. 2018 (GPT), sec. 4.1.
    """

    def __init__(self, context_length: int, d_model: int) -> None:
        super().__init__()
        # Left uninitialised: GPT draws the weights.
        self.embedding = nn.Embedding.from_pretrained(
            torch.empty(context_length, d_model), freeze=False
        )

    def forward(self, x_BTE: Tensor, positions: Positions) -> Tensor:
        return x_BTE + self.embedding.weight[table_index(positions)]
