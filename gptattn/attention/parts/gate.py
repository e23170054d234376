"""A gate on each head's output."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from gptattn.attention.linear import Linear
from gptattn.attention.parts.base import Part

Granularity = Literal["headwise", "elementwise"]


class Gate(Part):
    """Multiplies the heads' outputs Y by sigmoid(X W), where X is the attention's input.

    `headwise` has one gate per head, W [d_in, H]; `elementwise` one per number, W [d_in, H * D]. W
    has no bias and starts like any projection, so gates start near 1/2.

    Source: Qiu et al. 2025, arXiv:2505.06708, sec. 2.2: the gate after the attention (G1),
    multiplicative, with separate gates for each head.
    """

    def __init__(
        self, d_in: int, num_heads: int, head_dim: int, granularity: Granularity = "elementwise"
    ) -> None:
        super().__init__()
        self.headwise = granularity == "headwise"
        self.W_gate = Linear(d_in, num_heads * (1 if self.headwise else head_dim), bias=False)

    def mix(self, y_BHTD: Tensor, x_BTE: Tensor, entries: Mapping[str, Tensor]) -> Tensor:
        if not self.headwise:
            return y_BHTD
        return y_BHTD * torch.sigmoid(self.W_gate(x_BTE)).mT.unsqueeze(-1)

    def output(self, y_BTE: Tensor, x_BTE: Tensor) -> Tensor:
        return y_BTE if self.headwise else y_BTE * torch.sigmoid(self.W_gate(x_BTE))
