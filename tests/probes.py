"""Mechanisms for tests only, which show that the design has room for those to come."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.attention.base import Attention, Shared
from gptattn.attention.cache import Cache
from gptattn.attention.core import Backend
from gptattn.attention.linear import Linear
from gptattn.attention.variants.gqa import GroupedQueryAttention
from gptattn.position.base import HeadPosition, Positions


class LinearState(Attention):
    """Linear attention (2006.16236): a state of constant size.

    It has no maps, no heads that others could load, no dropout, no backends and no position.
    """

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__()
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.qkv = Linear(d_in, 3 * d_out)
        self.out_proj = Linear(d_out, d_out)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        shared = self.begin(x_BTE, cache, shared)
        qkv = self.qkv(x_BTE).unflatten(2, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, (F.elu(k) + 1) * there(shared.positions, x_BTE)
        kv_BHTDD = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        k_BHTD = k.cumsum(2)
        if cache is not None:
            kv_BHTDD = kv_BHTDD + cache.tensors["kv"][:, :, None]
            k_BHTD = k_BHTD + cache.tensors["k"][:, :, None]
            if x_BTE.shape[1]:
                cache.tensors["kv"].copy_(kv_BHTDD[:, :, -1])
                cache.tensors["k"].copy_(k_BHTD[:, :, -1])
        y = torch.einsum("bhtd,bhtde->bhte", q, kv_BHTDD)
        y_BHTD = y / ((q * k_BHTD).sum(-1, keepdim=True) + 1e-9)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(2))

    def new_cache(self, batch: int, capacity: int) -> Cache:
        k_BHD = self.out_proj.weight.new_zeros(batch, self.num_heads, self.head_dim)
        return Cache({"k": k_BHD, "kv": k_BHD.new_zeros(*k_BHD.shape, self.head_dim)})

    def flops(self, T: int, S: int) -> int:
        return 2 * T * self.num_heads * 2 * self.head_dim**2


def there(positions: Positions, like: Tensor) -> Tensor:
    """Return [B or 1, 1, T, 1]: 1 where there is a token, 0 where there is none."""
    if isinstance(positions, range):
        return like.new_ones(1, 1, len(positions), 1)
    assert isinstance(positions, Tensor)
    return (positions >= 0).to(like.dtype)[:, None, :, None]


def alternating(
    d_in: int,
    d_out: int,
    context_length: int,
    num_heads: int,
    qkv_bias: bool = False,
    backend: Backend = "sdpa",
    position: HeadPosition | None = None,
    layer: int = 0,
) -> Attention:
    """Build layers that differ: a constant state, then a window with one key/value head."""
    if layer % 2 == 0:
        return LinearState(d_in, d_out, context_length, num_heads)
    sizes = d_in, d_out, context_length, num_heads, 1
    how = {"qkv_bias": qkv_bias, "backend": backend, "position": position}
    return GroupedQueryAttention(*sizes, window=4, **how)
