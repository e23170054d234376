"""Heads side by side: the textbook's first multi-head form, and our baseline for speed."""

import torch
from torch import Tensor, nn

from gptattn.attention.base import Attention, HeadWeights, check_sizes
from gptattn.attention.cache import Cache, CacheGroup
from gptattn.attention.core import Backend
from gptattn.attention.linear import Linear
from gptattn.attention.single_head import CausalAttention
from gptattn.attention.split import load_out_proj
from gptattn.position.base import HeadPosition


class MultiHeadAttentionWrapper(Attention):
    """A list of `CausalAttention` heads, run one after the other, their outputs concatenated.

    x [B, T, d_in] -> y [B, T, d_out]; d_out is the total width, d_out / num_heads per head.
    `out_proj=False` is the textbook form. Raises ValueError where num_heads does not divide d_out.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.2, read literally.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        out_proj: bool = True,
        scale: float | None = None,
        backend: Backend = "sdpa",
        position: HeadPosition | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_out, num_heads, num_heads, dropout)
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.heads = nn.ModuleList(
            CausalAttention(
                d_in,
                d_out // num_heads,
                context_length,
                dropout,
                qkv_bias,
                scale=scale,
                backend=backend,
                position=position,
            )
            for _ in range(num_heads)
        )
        self.out_proj = Linear(d_out, d_out) if out_proj else None

    def _heads(self) -> list[CausalAttention]:
        return [head for head in self.heads if isinstance(head, CausalAttention)]

    def forward(self, x_BTE: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is None:
            y_BTE = torch.cat([head(x_BTE) for head in self.heads], dim=-1)
        elif isinstance(cache, CacheGroup):
            per_head = zip(self.heads, cache.caches, strict=True)
            y_BTE = torch.cat([head(x_BTE, head_cache) for head, head_cache in per_head], dim=-1)
        else:
            raise TypeError(f"{type(cache).__name__} is not this module's; use new_cache()")
        return y_BTE if self.out_proj is None else self.out_proj(y_BTE)

    def new_cache(self, batch: int, capacity: int) -> CacheGroup:
        return CacheGroup([head.new_cache(batch, capacity) for head in self._heads()])

    def attention_weights(self, x_BTE: Tensor) -> Tensor:
        return torch.cat([head.attention_weights(x_BTE) for head in self._heads()], dim=1)

    def flops(self, T: int, S: int) -> int:
        return sum(head.flops(T, S) for head in self._heads())

    def export_heads(self) -> HeadWeights:
        heads = [head.export_heads() for head in self._heads()]

        def stack(tensors: list[Tensor | None]) -> Tensor | None:
            present = [t for t in tensors if t is not None]
            return torch.cat(present) if present else None

        out, out_bias = None, None
        if self.out_proj is not None:
            out = self.out_proj.weight.detach().clone().unflatten(1, (len(heads), -1))
            out_bias = self.out_proj.bias.detach().clone()
        return HeadWeights(
            q_HDE=torch.cat([h.q_HDE for h in heads]),
            k_GDE=torch.cat([h.k_GDE for h in heads]),
            v_GDE=torch.cat([h.v_GDE for h in heads]),
            q_bias_HD=stack([h.q_bias_HD for h in heads]),
            k_bias_GD=stack([h.k_bias_GD for h in heads]),
            v_bias_GD=stack([h.v_bias_GD for h in heads]),
            out_EHD=out,
            out_bias_E=out_bias,
        )

    def load_heads(self, weights: HeadWeights) -> None:
        heads = self._heads()
        if not len(heads) == len(weights.q_HDE) == len(weights.k_GDE):
            raise ValueError(
                f"weights of {len(weights.q_HDE)} query and {len(weights.k_GDE)} key/value heads "
                f"do not fit num_heads={len(heads)}"
            )
        for i, head in enumerate(heads):
            one = slice(i, i + 1)
            head.load_heads(
                HeadWeights(
                    q_HDE=weights.q_HDE[one],
                    k_GDE=weights.k_GDE[one],
                    v_GDE=weights.v_GDE[one],
                    q_bias_HD=None if weights.q_bias_HD is None else weights.q_bias_HD[one],
                    k_bias_GD=None if weights.k_bias_GD is None else weights.k_bias_GD[one],
                    v_bias_GD=None if weights.v_bias_GD is None else weights.v_bias_GD[one],
                    out_EHD=None,
                    out_bias_E=None,
                )
            )
        load_out_proj(self.out_proj, weights)
