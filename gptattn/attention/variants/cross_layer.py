"""Cross-layer attention: layers that reuse the keys and values of an earlier layer."""

from collections.abc import Mapping
from typing import Annotated, Unpack

from msgspec import Meta
from torch import Tensor

from gptattn.attention.base import Shared
from gptattn.attention.cache import Cache, Entry
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import Heads, SoftmaxAttention, SoftmaxOptions, split_heads
from gptattn.position.base import Positions

NAME = "keys and values"  # the name in `Shared.state`, for the newest group


class CrossLayerAttention(SoftmaxAttention):
    """Grouped-query attention in which `share` consecutive layers share one cache.

    x [B, T, d_in] -> y [B, T, d_out]. The first layer of a group projects keys and values; the
    others read them from its cache, after parts and positions. A group begins where `share` divides
    `layer`, counted from 0 over the whole model. The other layers have no W_key and W_value, and
    cache only what parts need. Raises ValueError for impossible sizes, and for a layer that needs
    keys and values but runs alone.

    Source: Brandon et al. 2024, arXiv:2405.12981, sec. 2.2.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        num_kv_heads: int = 1,
        *,
        share: Annotated[int, Meta(ge=2)] = 2,
        layer: int = 0,
        qkv_bias: bool = False,
        out_bias: bool = True,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, num_kv_heads, **options)
        self.reuses = layer % share > 0
        window = "" if self.window is None else f", window={self.window}"
        self._sizes = f"of layer {layer - layer % share}, num_kv_heads={num_kv_heads}, "
        self._sizes += f"head_dim={self.head_dim}{window}, share={share}"
        size = num_kv_heads * self.head_dim
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = None if self.reuses else Linear(d_in, size, bias=qkv_bias)
        self.W_value = None if self.reuses else Linear(d_in, size, bias=qkv_bias)
        self.out_proj = Linear(d_out, d_out, bias=out_bias)
        if self.reuses:
            self.num_kv_heads = 0

    def project(self, x_BTE: Tensor) -> Heads:
        q_BHTD = split_heads(self.W_query(x_BTE), self.num_heads)
        if self.W_key is None or self.W_value is None:
            return q_BHTD, q_BHTD[:, :0], q_BHTD[:, :0]
        k_BGTD = split_heads(self.W_key(x_BTE), self.num_kv_heads)
        v_BGTD = split_heads(self.W_value(x_BTE), self.num_kv_heads)
        return q_BHTD, k_BGTD, v_BGTD

    def entries(self, x_BTE: Tensor, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
        q_BHTD, new = super().entries(x_BTE, shared)
        return q_BHTD, {} if self.reuses else new

    def cached(self) -> dict[str, Entry]:
        return {} if self.reuses else super().cached()

    def own_values(self, new: Mapping[str, Tensor], shared: Shared) -> Tensor:
        return shared.state[NAME][2] if self.reuses else new["v"]

    def remember(
        self, new: Mapping[str, Tensor], cache: Cache | None, shared: Shared
    ) -> tuple[Mapping[str, Tensor], Positions]:
        held, k_pos = super().remember(new, cache, shared) if new else ({}, shared.positions)
        if not self.reuses:
            shared.state[NAME] = {"k": held["k"], "v": held["v"]}, k_pos, new["v"]
            return held, k_pos
        if NAME not in shared.state:
            raise ValueError(f"{NAME} {self._sizes} are missing; run this after that layer")
        first, k_pos, _ = shared.state[NAME]
        return {**first, **held}, k_pos

    def provides(self) -> dict[str, str]:
        return super().provides() | ({} if self.reuses else {NAME: self._sizes})

    def needs(self) -> dict[str, str]:
        return super().needs() | ({NAME: self._sizes} if self.reuses else {})
