"""Attention with linear biases (ALiBi)."""

import torch
from torch import Tensor

from gptattn.position.base import Documents, HeadPosition, Positions


class LinearBias(HeadPosition):
    """Each score falls by its head's slope times the distance between query and key.

    If H is a power of two, head i has the slope 2^(-8 (i + 1) / H). For other H, heads take the
    slopes for the next lower power of two, then every second slope for the next higher one. Nothing
    is trained.

    Source: Press et al. 2021, arXiv:2108.12409, sec. 3; other H: the authors' code.
    """

    decays = True
    slope_H: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        below = 1 << (num_heads.bit_length() - 1)  # the power of two at or below num_heads
        slopes = _slopes(below) + _slopes(2 * below)[::2][: num_heads - below]
        # In float64: a slope of 0.7 times position 9,999 is precise only to 0.001 in float32.
        slope_H = torch.tensor(slopes, dtype=torch.float64)
        self.register_buffer("slope_H", slope_H, persistent=False)

    def decay(self, positions: Positions) -> Tensor:
        slope_H = self.slope_H
        wide = torch.promote_types(slope_H.dtype, torch.float32)
        if isinstance(positions, Documents):  # only distances within a document count
            positions = range(positions.start_BT.shape[1])
        if isinstance(positions, range):
            at_BN = torch.arange(positions.start, positions.stop, device=slope_H.device)[None]
        else:
            at_BN = positions.reshape(-1, positions.shape[-1])  # B is 1 unless rows differ
        return -slope_H.to(wide)[:, None] * at_BN[:, None].to(wide)


def _slopes(heads: int) -> list[float]:
    return [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]
