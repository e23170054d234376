"""Queries that grow with their position, so that long contexts do not flatten the weights."""

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from gptattn.attention.base import Shared
from gptattn.attention.parts.base import Part
from gptattn.attention.rule import Span


class Temperature(Part):
    """A query at position p becomes q (1 + strength * log(1 + (p + 1) // floor)).

    The first `floor` - 1 tokens don't change. It has no parameters.

    Source: Llama 4, Meta 2025, in the layers without positions; after Nakanishi 2025,
    arXiv:2501.19399, sec. 3.
    """

    def __init__(
        self,
        strength: Annotated[float, Meta(gt=0)] = 0.1,
        floor: Annotated[int, Meta(ge=1)] = 8192,
    ) -> None:
        super().__init__()
        self.strength, self.floor = strength, floor

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = slice(0, q_BHTD.shape[2])
        p_B1T1 = Span(shared.positions, tokens, -1, q_BHTD.device).pos
        steps_B1T1 = torch.div(p_B1T1 + 1, self.floor, rounding_mode="floor")
        wide = torch.promote_types(q_BHTD.dtype, torch.float32)
        factor_B1T1 = 1 + self.strength * torch.log1p(steps_B1T1.to(wide))
        return q_BHTD * factor_B1T1.to(q_BHTD.dtype), k_BGTD, v_BGTD
