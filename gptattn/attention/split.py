"""What the variants with one projection per role share: project, split into heads, attend, merge.

`CausalAttention`, `MultiHeadAttention` and `GroupedQueryAttention` differ only in their head counts
and in whether an output projection is possible.
"""

from torch import Tensor, nn

from gptattn.attention.base import Attention, Carried, check_sizes
from gptattn.attention.cache import Cache
from gptattn.attention.capabilities import HasHeads, HasMaps, HeadWeights, copy_into
from gptattn.attention.core import Backend, check_backend
from gptattn.attention.heads import (
    attend_cached,
    load_out_proj,
    names_of,
    per_head,
    seen_pairs,
)
from gptattn.attention.linear import Joint, Linear, Preparable, prepare
from gptattn.attention.rule import Rule, attention_weights
from gptattn.attention.token_cache import KVCache
from gptattn.position.base import HeadPosition


class SplitAttention(Attention, HasMaps, HasHeads, Preparable):
    """Softmax attention with H query heads and G key/value heads; variants narrow its constructor.

    x [B, T, d_in] -> y [B, T, d_out]. Raises ValueError for impossible sizes.
    """

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
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_out // num_heads
        self._plain = Rule(self.head_dim**-0.5 if scale is None else scale)
        self.scale = self._plain.scale
        self.dropout = dropout
        self.backend: Backend = backend
        # Built in the tutorials' order, so that the same seed gives the same numbers.
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.W_value = Linear(d_in, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.out_proj = Linear(d_out, d_out) if out_proj else None
        self.position = position
        self._joint = Joint()

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Return the query, key and value layers."""
        return self.W_query, self.W_key, self.W_value

    def prepare(self, rows: int | None) -> None:
        self._joint.prepare(self.projections(), rows)
        for child in self.children():
            if child not in self.projections():
                prepare(child, rows)

    def project(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, T, D], keys and values [B, G, T, D]; a variant may extend this."""
        q, k, v = (
            y.view(*x_BTE.shape[:2], heads, self.head_dim).transpose(1, 2)
            for y, heads in zip(
                self._joint(x_BTE, self.projections()),
                (self.num_heads, self.num_kv_heads, self.num_kv_heads),
                strict=True,
            )
        )
        return q, k, v

    def rule(self) -> Rule:
        """Return which keys a query sees and what happens to scores. Variants override this."""
        return self._plain

    def located(self, x_BTE: Tensor, carried: Carried) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of `project` with positions applied.

        A variant may mix in what earlier layers left in `carried`.
        """
        q_BHTD, k_BGTD, v_BGTD = self.project(x_BTE)
        if self.position is not None:
            q_BHTD, k_BGTD = self.position.rotate(q_BHTD, k_BGTD, carried.positions)
        return q_BHTD, k_BGTD, v_BGTD

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, carried: Carried | None = None
    ) -> Tensor:
        carried = self.begin(x_BTE, cache, carried)
        y_BHTD = attend_cached(
            *self.located(x_BTE, carried),
            self.rule(),
            carried.positions,
            cache,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        y_BTE = y_BHTD.transpose(1, 2).flatten(2)
        return y_BTE if self.out_proj is None else self.out_proj(y_BTE)

    def residual_writer(self) -> nn.Linear | None:
        return self.out_proj

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        w = self.W_key.weight
        heads, window = self.num_kv_heads, self.rule().window
        return KVCache(batch, heads, capacity, self.head_dim, w.dtype, w.device, window)

    def attention_weights(self, x_BTE: Tensor, carried: Carried | None = None) -> Tensor:
        carried = self.begin(x_BTE, None, carried)
        q_BHTD, k_BGTD, _ = self.located(x_BTE, carried)
        at = carried.positions
        return attention_weights(q_BHTD, k_BGTD, self.rule(), q_pos=at, k_pos=at)

    def flops(self, T: int, S: int) -> int:
        window = self.rule().window
        return 2 * 2 * self.num_heads * self.head_dim * seen_pairs(T, S, window)

    def export_heads(self) -> HeadWeights:
        def heads(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
            bias = None if linear.bias is None else per_head(linear.bias, self.head_dim)
            return per_head(linear.weight, self.head_dim), bias

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

    def names_in_heads(self) -> set[str]:
        return names_of(self, ("W_query", "W_key", "W_value", "out_proj"))
