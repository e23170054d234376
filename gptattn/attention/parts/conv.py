"""A short convolution before the scores."""

from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.convolution import ShortConvolution
from gptattn.attention.parts.base import Part
from gptattn.attention.softmax import split_heads


class Conv(Part):
    """x becomes x + conv(x), a causal depthwise convolution over `size` tokens, without bias.

    `targets` are queries, keys and values, convolved before positions, and the attention's input,
    which other parts then get too. Each target has its own convolution, K = size numbers per
    channel: 2 * G * D * K parameters for k and v; a layer that projects no keys and values has
    neither. They are drawn from N(0, std), as in transformers' Inkling, so x hardly changes at
    first. The cache keeps the last K - 1 inputs. A window then reaches up to K - 1 tokens further
    back, or 2 (K - 1) if the input is convolved, too. Computed in float32 or wider. Raises
    ValueError for other targets.

    Source: k and v as in Inkling, transformers' InklingShortConvolution; the input as in Canon
    layers (A): Allen-Zhu 2025, arXiv:2512.17351.
    """

    def __init__(
        self,
        d_in: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        size: Annotated[int, Meta(ge=2, le=4)] = 4,
        targets: Sequence[str] = ("k", "v"),
    ) -> None:
        super().__init__()
        keys = num_kv_heads * head_dim
        channels = {"q": num_heads * head_dim, "k": keys, "v": keys, "input": d_in}
        if not targets or [*targets] != [name for name in channels if name in targets]:
            chosen, choices = (",".join(names) for names in (targets, channels))
            raise ValueError(f"targets=[{chosen}] is not valid; give some of {choices} in order")
        self.targets = frozenset(targets)
        self.convolutions = nn.ModuleDict(
            {
                name: ShortConvolution(count, size, tail=f"conv_{name}")
                for name, count in channels.items()
                if name in self.targets and count
            }
        )

    @property
    def changes_heads(self) -> bool:
        return self.targets != {"input"}

    def input(self, x_BTE: Tensor, shared: Shared) -> Tensor:
        return self._convolve("input", x_BTE, shared) if "input" in self.convolutions else x_BTE

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            split_heads(self._convolve(name, x.transpose(1, 2).flatten(2), shared), x.shape[1])
            if name in self.convolutions
            else x
            for name, x in (("q", q_BHTD), ("k", k_BGTD), ("v", v_BGTD))
        )
        return q, k, v

    def _convolve(self, name: str, x_BTC: Tensor, shared: Shared) -> Tensor:
        wide = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        y = self.convolutions[name](wide, shared.cache, shared.positions)
        return (wide + y).to(x_BTC.dtype)

    def state(self) -> dict[str, tuple[int, ...]]:
        convolutions = (c for c in self.convolutions.values() if isinstance(c, ShortConvolution))
        return {c.tail: (c.size - 1, len(c.weight_C1K)) for c in convolutions}

    def initialise(self, std: float) -> None:
        for parameter in self.parameters():
            parameter.normal_(0.0, std)
