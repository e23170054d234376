"""Cross-layer attention: layers that reuse the keys and values of a layer before them."""

from collections.abc import Mapping

from torch import Tensor

from gptattn.attention.base import Carried
from gptattn.attention.cache import Cache
from gptattn.attention.core import Backend
from gptattn.attention.linear import Joint, Linear, Preparable, prepare
from gptattn.attention.softmax import Heads, SoftmaxAttention
from gptattn.attention.token_cache import Entry
from gptattn.position.base import HeadPosition, Positions


class CrossLayerAttention(SoftmaxAttention, Preparable):
    """Grouped-query attention in which `share` layers, one after the other, have one cache.

    x [B, T, d_in] -> y [B, T, d_out]. The first of them projects keys and values, the others use
    these as they are in its cache, after parts and positions. `layer`, counted from 0 over the
    whole model, says which this is: a group begins where `share` divides it. The others have
    neither W_key nor W_value, and cache only what parts need. Raises ValueError for impossible
    sizes, and where a layer that needs keys and values runs on its own.

    Source: Brandon et al. 2024, arXiv:2405.12981, sec. 2.2.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        num_kv_heads: int = 1,
        share: int = 2,
        out_bias: bool = True,
        scale: float | None = None,
        window: float | None = None,
        backend: Backend = "sdpa",
        position: HeadPosition | None = None,
        layer: int = 0,
    ) -> None:
        if share < 2:
            raise ValueError(f"share={share} must be 2 or more; 2: every second layer reuses")
        super().__init__(
            d_in=d_in,
            d_out=d_out,
            context_length=context_length,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            dropout=dropout,
            scale=scale,
            window=window,
            backend=backend,
            position=position,
        )
        self.reuses = layer % share > 0
        self._name = f"keys and values of layer {layer - layer % share}"
        seen = "" if self.window is None else f", window={self.window}"
        self._sizes = f"num_kv_heads={num_kv_heads}, head_dim={self.head_dim}{seen}, share={share}"
        self._order = (
            f"share={share} wants {share} such layers in a row, the first of them layer "
            f"0, {share}, {2 * share}, ..."
        )
        size = num_kv_heads * self.head_dim
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = None if self.reuses else Linear(d_in, size, bias=qkv_bias)
        self.W_value = None if self.reuses else Linear(d_in, size, bias=qkv_bias)
        self.out_proj = Linear(d_out, d_out, bias=out_bias)
        if self.reuses:
            self.num_kv_heads = 0
        self._joint = Joint()

    def projections(self) -> list[Linear]:
        """Return the query, key and value layers; the query layer alone where the others lack."""
        if self.W_key is None or self.W_value is None:
            return [self.W_query]
        return [self.W_query, self.W_key, self.W_value]

    def prepare(self, rows: int | None) -> None:
        layers = self.projections()
        self._joint.prepare(layers, rows)
        for child in self.children():
            if child not in layers:
                prepare(child, rows)

    def project(self, x_BTE: Tensor) -> Heads:
        q_BHTD, *rest = (
            y.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for y in self._joint(x_BTE, self.projections())
        )
        if self.reuses:
            return q_BHTD, q_BHTD[:, :0], q_BHTD[:, :0]
        return q_BHTD, rest[0], rest[1]

    def entries(
        self, x_BTE: Tensor, cache: Cache | None, carried: Carried
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.reuses:
            return super().entries(x_BTE, cache, carried)
        q_BHTD, _, _ = self.located(x_BTE, carried)
        return q_BHTD, self.entries_of_parts(x_BTE, cache) if self.kept() else {}

    def kept(self) -> dict[str, Entry]:
        return self.kept_by_parts() if self.reuses else super().kept()

    def remember(
        self, new: Mapping[str, Tensor], cache: Cache | None, carried: Carried
    ) -> tuple[Mapping[str, Tensor], Positions]:
        held, k_pos = super().remember(new, cache, carried) if new else ({}, carried.positions)
        if not self.reuses:
            carried.left[self._name] = {"k": held["k"], "v": held["v"]}, k_pos
            return held, k_pos
        if self._name not in carried.left:
            raise ValueError(f"the {self._name} are missing; run it after that layer, in a model")
        shared, k_pos = carried.left[self._name]
        return {**shared, **held}, k_pos

    def leaves(self) -> dict[str, str]:
        return super().leaves() | ({} if self.reuses else {self._name: self._sizes})

    def needs(self) -> dict[str, str]:
        return super().needs() | ({self._name: self._sizes} if self.reuses else {})

    def layer_order(self) -> str:
        return self._order
