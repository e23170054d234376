"""Values times a constant."""

from typing import Annotated

from msgspec import Meta
from torch import Tensor

from gptattn.attention.base import Shared
from gptattn.attention.parts.base import Part


class ValueScale(Part):
    """Values v become scale * v, before the cache. It has no parameters.

    Source: MiMo-V2-Flash, Xiaomi 2026, arXiv:2601.02780 (`attention_value_scale` 0.707).
    """

    def __init__(self, scale: Annotated[float, Meta(gt=0)] = 0.707) -> None:
        super().__init__()
        self.scale = scale

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q_BHTD, k_BGTD, self.scale * v_BGTD
