"""Separate heads side by side: the textbook's first multi-head form, and our speed baseline."""

import torch
from torch import Tensor, nn

from gptattn.attention.base import Attention, Carried, check_sizes
from gptattn.attention.cache import Cache
from gptattn.attention.capabilities import HasHeads, HasMaps, HeadWeights
from gptattn.attention.core import Backend
from gptattn.attention.heads import attend_cached, load_out_proj, names_of
from gptattn.attention.linear import Joint, Linear, Preparable, prepare
from gptattn.attention.single_head import CausalAttention
from gptattn.attention.token_cache import KVCache
from gptattn.position.base import HeadPosition, Positions


class MultiHeadAttentionWrapper(Attention, HasMaps, HasHeads, Preparable):
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
        self._joint = Joint()

    def _heads(self) -> list[CausalAttention]:
        return [head for head in self.heads if isinstance(head, CausalAttention)]

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, carried: Carried | None = None
    ) -> Tensor:
        carried = self.begin(x_BTE, cache, carried)
        if cache is None:
            y_BTE = torch.cat([head(x_BTE, None, carried) for head in self.heads], dim=-1)
        else:
            y_BTE = self._decode(x_BTE, cache, carried.positions)
        return y_BTE if self.out_proj is None else self.out_proj(y_BTE)

    def residual_writer(self) -> nn.Linear | None:
        return self.out_proj

    def _decode(self, x_BTE: Tensor, cache: Cache, positions: Positions) -> Tensor:
        """Run all heads at once, with one cache in the layout that other variants use."""
        one = self._heads()[0]
        parts = self._joint(x_BTE, self._projections())
        q, k, v = (torch.stack(tuple(parts[i::3]), dim=1) for i in range(3))  # [B, H, T, D]
        if one.position is not None:
            q, k = one.position.rotate(q, k, positions)
        dropout = one.dropout if self.training else 0.0
        y_BHTD = attend_cached(
            q, k, v, one.rule(), positions, cache, dropout=dropout, backend=one.backend
        )
        return y_BHTD.transpose(1, 2).flatten(2)

    def _projections(self) -> list[nn.Linear]:
        """Return the query, key and value layers of each head in turn."""
        return [layer for head in self._heads() for layer in head.projections()]

    def prepare(self, rows: int | None) -> None:
        self._joint.prepare(self._projections(), rows)
        if self.out_proj is not None:
            prepare(self.out_proj, rows)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        head = self._heads()[0]
        w, window = head.W_key.weight, head.rule().window
        return KVCache(batch, len(self.heads), capacity, head.head_dim, w.dtype, w.device, window)

    def attention_weights(self, x_BTE: Tensor, carried: Carried | None = None) -> Tensor:
        maps = [head.attention_weights(x_BTE, carried) for head in self._heads()]
        return torch.cat(maps, dim=1)

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

    def names_in_heads(self) -> set[str]:
        of_heads = {
            f"heads.{i}.{name}"
            for i, head in enumerate(self._heads())
            for name in head.names_in_heads()
        }
        return of_heads | names_of(self, ("out_proj",))
