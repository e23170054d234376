"""The first layer's values, mixed into those of later layers."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.parts.base import Part

VALUES = "values"  # the name in `Shared.state`, for the first layer that has values


class ValueResidual(Part):
    """A layer's values v become a * v + b * v_first, with two learned numbers a and b per layer.

    v_first are the values of the first layer that has any; it has no a and b. Both start at 0.5.
    It acts before the cache, so the cache keeps its size. A layer that projects no values doesn't
    change.

    Source: Zhou et al. 2024, arXiv:2410.17897, sec. 3.2, the learnable form.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, provided: Collection[str] = ()) -> None:
        super().__init__()
        sizes = f"num_kv_heads={num_kv_heads}, head_dim={head_dim}"
        self.passed_on = {VALUES: sizes} if num_kv_heads else {}
        mixes = num_kv_heads > 0 and VALUES in provided
        self.shares = nn.Parameter(torch.full((2,), 0.5)) if mixes else None

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.shares is not None:
            v_BGTD = self.shares[0] * v_BGTD + self.shares[1] * shared.state[VALUES]
        elif self.passed_on:
            shared.state[VALUES] = v_BGTD
        return q_BHTD, k_BGTD, v_BGTD

    def provides(self) -> dict[str, str]:
        return self.passed_on if self.shares is None else {}

    def needs(self) -> dict[str, str]:
        return {} if self.shares is None else self.passed_on
