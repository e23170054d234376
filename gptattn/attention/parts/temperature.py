"""Queries that grow with their position, so that long contexts do not flatten the weights."""

import math

import torch
from torch import Tensor

from gptattn.attention.base import Shared
from gptattn.attention.parts.base import Part
from gptattn.position.base import Documents


class Temperature(Part):
    """A query at position p becomes q (1 + strength * log(1 + floor((p + 1) / floor))).

    Up to `floor` - 1 tokens nothing changes. Without parameters. Raises ValueError for a strength
    that is not positive, and for a floor below 1.

    Source: Llama 4, Meta 2025, in the layers without positions; after Nakanishi 2025,
    arXiv:2501.19399, sec. 3.
    """

    def __init__(self, strength: float = 0.1, floor: int = 8192) -> None:
        super().__init__()
        if not 0 < strength < math.inf:
            raise ValueError(f"strength={strength} must be a positive number; 0.1 is Llama 4's")
        if floor < 1:
            raise ValueError(f"floor={floor} must be 1 or more tokens; 8192 is Llama 4's")
        self.strength, self.floor = strength, floor

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        at = shared.positions
        if isinstance(at, Documents):
            at = at.position_BT
        elif isinstance(at, range):
            at = torch.arange(at.start, at.stop, device=q_BHTD.device)
        steps = torch.div(at + 1, self.floor, rounding_mode="floor")
        wide = torch.promote_types(q_BHTD.dtype, torch.float32)
        factor = 1 + self.strength * torch.log1p(steps.to(wide))
        factor_BHTD = factor.reshape(-1, 1, factor.shape[-1], 1).to(q_BHTD.dtype)
        return q_BHTD * factor_BHTD, k_BGTD, v_BGTD
