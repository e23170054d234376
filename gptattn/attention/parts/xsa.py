"""Exclusive self-attention: a head's output leaves out what comes from the token itself."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.attention.parts.base import Part


class ExclusiveSelfAttention(Part):
    """A head's output y becomes y - s (y . u) u, where u is the token's own value at length 1.

    s = 1 makes y orthogonal to the value, so the first token's output is 0. With `learned`,
    s = tanh(alpha), with one alpha per head that starts at 0: H parameters. A group's heads share
    the value. It is computed in float32 or wider. In `differential`, y and u belong to a pair,
    after its norm. With a cache in fewer bits, u is still exact.

    Source: Zhai 2026, arXiv:2603.09078; learned: transformers' NeoMME.
    """

    uses_values: ClassVar[bool] = True

    def __init__(self, num_heads: int, learned: bool = False) -> None:
        super().__init__()
        self.alpha_H = nn.Parameter(torch.zeros(num_heads)) if learned else None

    def mix(self, y_BHTD: Tensor, x_BTE: Tensor, entries: Mapping[str, Tensor]) -> Tensor:
        wide = torch.promote_types(y_BHTD.dtype, torch.float32)
        u_BGTX, D = F.normalize(entries["v"].to(wide), dim=-1), y_BHTD.shape[3]
        # [B, G, R, n, T, D]: n heads of y, side by side, have one value of n D numbers.
        n = u_BGTX.shape[3] // D
        y = y_BHTD.to(wide).unflatten(1, (u_BGTX.shape[1], -1, n))
        u = u_BGTX.unflatten(3, (n, D)).transpose(2, 3).unsqueeze(2)
        along = (y * u).sum((3, 5), keepdim=True) * u
        if self.alpha_H is not None:
            along = along * self.alpha_H.to(wide).tanh().view(*y.shape[1:4], 1, 1)
        return (y - along).flatten(1, 3).to(y_BHTD.dtype)
