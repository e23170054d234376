"""Separate heads side by side: Raschka's (2024) first multi-head form, and a speed baseline."""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, nn

from gptattn.attention.base import HasHeads
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import Heads, PlacedRule, SoftmaxAttention, SoftmaxOptions
from gptattn.attention.variants.single_head import CausalAttention


class MultiHeadAttentionWrapper(HasHeads, SoftmaxAttention):
    """A list of `CausalAttention` heads, run one after the other, their outputs concatenated.

    x [B, T, d_in] -> y [B, T, d_out]; d_out is the total width, d_out / num_heads per head.
    `out_proj=False` is Raschka's form. Raises ValueError if num_heads does not divide d_out.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.2, read literally.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        qkv_bias: bool = False,
        out_proj: bool = True,
        out_bias: bool = True,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, num_heads, **options)
        # The wrapper has parts, positions and the cache; a head alone is plain attention.
        self.heads = nn.ModuleList(
            CausalAttention(d_in, self.head_dim, context_length, qkv_bias=qkv_bias)
            for _ in range(num_heads)
        )
        self.out_proj = Linear(d_out, d_out, bias=out_bias) if out_proj else None

    def project(self, x_BTE: Tensor) -> Heads:
        q, k, v = [], [], []
        for head in self.heads:
            assert isinstance(head, CausalAttention)
            q.append(head.W_query(x_BTE))
            k.append(head.W_key(x_BTE))
            v.append(head.W_value(x_BTE))
        return torch.stack(q, dim=1), torch.stack(k, dim=1), torch.stack(v, dim=1)

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], placed: PlacedRule) -> Tensor:
        # These hold numbers for all heads together.
        for_all = (placed.rule.bias, placed.rule.decay, placed.rule.sink_H)
        decodes = q_BHTD.shape[2] < held["k"].shape[2]  # one by one would only be slower
        if decodes or any(x is not None for x in for_all):
            return super().attend(q_BHTD, held, placed)
        outputs = []
        for h in range(self.num_heads):
            q, k, v = (x.narrow(1, h, 1) for x in (q_BHTD, held["k"], held["v"]))
            outputs.append(self.mix(q, k, v, placed))
        return torch.cat(outputs, dim=1)

    def modules_of_heads(self) -> list[str]:
        return [f"heads.{i}." for i in range(self.num_heads)]
