"""What the variants with one projection per role share: project, split into heads, attend, merge.

`CausalAttention`, `MultiHeadAttention` and `GroupedQueryAttention` differ in their head counts
and in nothing else.
"""

import math

import torch
from torch import Tensor, nn

from gptattn.attention.base import Attention, HeadWeights, check_sizes, copy_into
from gptattn.attention.cache import Cache, KVCache
from gptattn.attention.core import Backend, attend, attention_weights, check_backend
from gptattn.attention.linear import Joint, Linear, Preparable, prepare
from gptattn.position.base import HeadPosition, Offset


class SplitAttention(Attention, Preparable):
    """Softmax attention over H query heads and G key/value heads; abstract in its constructor."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        dropout: float,
        qkv_bias: bool,
        num_kv_heads: int,
        out_proj: bool,
        scale: float | None,
        backend: Backend,
        position: HeadPosition | None,
    ) -> None:
        super().__init__()
        check_sizes(d_out, num_heads, num_kv_heads, dropout)
        check_backend(backend)
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"scale={scale} must be a positive number; None: head_dim ** -0.5")
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_out // num_heads
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.dropout = dropout
        self.backend: Backend = backend
        # The order of construction is the tutorials': a seed gives their numbers.
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.W_value = Linear(d_in, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.out_proj = Linear(d_out, d_out) if out_proj else None
        self.position = position
        self._joint = Joint()

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.W_query, self.W_key, self.W_value

    def prepare(self, rows: int | None) -> None:
        self._joint.prepare(self.projections(), rows)
        for child in self.children():
            if child not in self.projections():
                prepare(child, rows)

    def project(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, G, T, D]; a variant may do more to them."""
        q, k, v = (
            y.view(*x_BTE.shape[:2], heads, self.head_dim).transpose(1, 2)
            for y, heads in zip(
                self._joint(x_BTE, self.projections()),
                (self.num_heads, self.num_kv_heads, self.num_kv_heads),
                strict=True,
            )
        )
        return q, k, v

    def _located(self, x_BTE: Tensor, offset: Offset) -> tuple[Tensor, Tensor, Tensor]:
        """What `project` gives for tokens that start at `offset`, with their positions in it."""
        q_BHTD, k_BGTD, v_BGTD = self.project(x_BTE)
        if self.position is not None:
            q_BHTD, k_BGTD = self.position.rotate(q_BHTD, k_BGTD, offset)
        return q_BHTD, k_BGTD, v_BGTD

    def forward(self, x_BTE: Tensor, cache: Cache | None = None) -> Tensor:
        self.check_length(x_BTE.shape[1] + (0 if cache is None else cache.length))
        qkv = self._located(x_BTE, 0 if cache is None else cache.offset)
        dropout = self.dropout if self.training else 0.0
        if cache is None:
            y_BHTD = attend(*qkv, scale=self.scale, dropout=dropout, backend=self.backend)
        else:
            y_BHTD = attend_cached(
                *qkv, cache, scale=self.scale, dropout=dropout, backend=self.backend
            )
        y_BTE = y_BHTD.transpose(1, 2).flatten(2)
        return y_BTE if self.out_proj is None else self.out_proj(y_BTE)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        w = self.W_key.weight
        return KVCache(batch, self.num_kv_heads, capacity, self.head_dim, w.dtype, w.device)

    def attention_weights(self, x_BTE: Tensor) -> Tensor:
        self.check_length(x_BTE.shape[1])
        q_BHTD, k_BGTD, _ = self._located(x_BTE, 0)
        return attention_weights(q_BHTD, k_BGTD, self.scale)

    def flops(self, T: int, S: int) -> int:
        pairs = T * (S - T) + T * (T + 1) // 2
        return 2 * 2 * self.num_heads * self.head_dim * pairs

    def export_heads(self) -> HeadWeights:
        def heads(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
            bias = None if linear.bias is None else _split(linear.bias, self.head_dim)
            return _split(linear.weight, self.head_dim), bias

        (q, q_bias), (k, k_bias), (v, v_bias) = map(heads, (self.W_query, self.W_key, self.W_value))
        out, out_bias = None, None
        if self.out_proj is not None:
            out = self.out_proj.weight.detach().clone().unflatten(1, (-1, self.head_dim))
            out_bias = self.out_proj.bias.detach().clone()
        return HeadWeights(q, k, v, q_bias, k_bias, v_bias, out, out_bias)

    def load_heads(self, weights: HeadWeights) -> None:
        for linear, weight, bias, what in (
            (self.W_query, weights.q_HDE, weights.q_bias_HD, "query"),
            (self.W_key, weights.k_GDE, weights.k_bias_GD, "key"),
            (self.W_value, weights.v_GDE, weights.v_bias_GD, "value"),
        ):
            heads = len(linear.weight) // self.head_dim
            if weight.shape[:2] != (heads, self.head_dim):
                raise ValueError(
                    f"{what} weights of {weight.shape[0]} heads of size {weight.shape[1]} do not "
                    f"fit this module's {heads} of size {self.head_dim}"
                )
            copy_into(linear.weight, weight.flatten(0, 1), f"{what} weight")
            copy_into(linear.bias, None if bias is None else bias.flatten(), f"{what} bias")
        load_out_proj(self.out_proj, weights)


def attend_cached(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    cache: Cache,
    *,
    scale: float,
    dropout: float,
    backend: Backend,
) -> Tensor:
    """Write the keys and values into the cache, and attend to all that it holds then."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"{type(cache).__name__} is not this module's; use new_cache()")
    return attend(
        q_BHTD,
        *cache.extend(k_BGTD, v_BGTD),
        scale=scale,
        dropout=dropout,
        backend=backend,
        padding_B=cache.padding_B,
    )


def load_out_proj(out_proj: nn.Linear | None, weights: HeadWeights) -> None:
    out = None if weights.out_EHD is None else weights.out_EHD.flatten(1)
    copy_into(None if out_proj is None else out_proj.weight, out, "output weight")
    copy_into(None if out_proj is None else out_proj.bias, weights.out_bias_E, "output bias")


def _split(parameter: torch.Tensor, head_dim: int) -> Tensor:
    return parameter.detach().clone().unflatten(0, (-1, head_dim))
