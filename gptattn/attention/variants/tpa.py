"""Tensor product attention: queries, keys and values of a token are short sums of outer products.

Letters besides those in `base.py`: C terms of a sum (a rank), X = C * H.
"""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, einsum, nn

from gptattn.attention.base import Shared
from gptattn.attention.cache import Entry
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import (
    Heads,
    PlacedRule,
    SoftmaxAttention,
    SoftmaxOptions,
    seen_pairs,
    split_heads,
)


class TensorProductAttention(SoftmaxAttention):
    """A token's queries [H, D] are a mean of C outer products, and so are its keys and values.

    x [B, T, d_in] -> y [B, T, d_out]. The factors a [H] and b [D] of a product are linear in x,
    without biases; C is query_rank, key_rank or value_rank. Positions rotate b. The cache holds a
    and b of keys and values, (key_rank + value_rank) * (H + D) numbers per token. Raises ValueError
    for impossible sizes and ranks.

    The six matrices are drawn by Xavier's uniform rule. The authors' code applies it to their views
    [d_in, H, C] and [d_in, C, D], with bounds smaller by up to sqrt(C) for a and sqrt(D) for b. It
    also starts the output projection at 0; here it is drawn as in the other attentions.

    Source: Zhang et al. 2025, arXiv:2501.06425, sec. 3; weights: appendix G; decoding: sec. 5.
    """

    keeps_heads = False

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        query_rank: int = 6,
        key_rank: int = 2,
        value_rank: int = 2,
        out_bias: bool = True,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, num_heads, **options)
        self.ranks = query_rank, key_rank, value_rank
        for name, rank in zip(("query_rank", "key_rank", "value_rank"), self.ranks, strict=True):
            if not 1 <= rank <= d_in:
                raise ValueError(f"{name}={rank} does not fit; give 1 to {d_in}, the model's width")
        # A matrix per factor, as in the paper: Muon would orthogonalise a fused one as a whole.
        H, D = num_heads, self.head_dim
        self.W_query_a, self.W_key_a, self.W_value_a = (
            Linear(d_in, C * H, bias=False) for C in self.ranks
        )
        self.W_query_b, self.W_key_b, self.W_value_b = (
            Linear(d_in, C * D, bias=False) for C in self.ranks
        )
        self.out_proj = Linear(d_out, d_out, bias=out_bias)

    def initialise(self, std: float) -> None:
        super().initialise(std)
        for layer in (self.W_query_a, self.W_key_a, self.W_value_a):
            nn.init.xavier_uniform_(layer.weight)
        for layer in (self.W_query_b, self.W_key_b, self.W_value_b):
            nn.init.xavier_uniform_(layer.weight)

    def project(self, x_BTE: Tensor) -> Heads:
        """Return the factors b [B, C, T, D] of queries, keys and values, which positions rotate."""
        C_q, C_k, C_v = self.ranks
        b_q = split_heads(self.W_query_b(x_BTE), C_q)
        b_k = split_heads(self.W_key_b(x_BTE), C_k)
        return b_q, b_k, split_heads(self.W_value_b(x_BTE), C_v)

    def entries(self, x_BTE: Tensor, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
        b_q, b_k, b_v = self.encode(*self.project(x_BTE), shared)
        C_q, C_k, C_v = self.ranks
        a = self.W_query_a(x_BTE) / C_q, self.W_key_a(x_BTE) / C_k, self.W_value_a(x_BTE) / C_v
        # Tokens come last because decoding multiplies rows of scores by rows of a.
        a_q, a_k, a_v = (a_BTX.mT.unsqueeze(3) for a_BTX in a)
        return self._sum(a_q, b_q), {"a_k": a_k, "b_k": b_k, "a_v": a_v, "b_v": b_v}

    def own_values(self, new: Mapping[str, Tensor], shared: Shared) -> Tensor:
        return self._sum(new["a_v"], new["b_v"])

    def cached(self) -> dict[str, Entry]:
        _, C_k, C_v = self.ranks
        a = {"a_k": Entry(C_k * self.num_heads, 1), "a_v": Entry(C_v * self.num_heads, 1)}
        b = {"b_k": Entry(C_k, self.head_dim), "b_v": Entry(C_v, self.head_dim)}
        return a | b

    def _by_term(self, a_BXS1: Tensor) -> Tensor:
        return a_BXS1.squeeze(3).unflatten(1, (-1, self.num_heads))

    def _sum(self, a_BXS1: Tensor, b_BCSD: Tensor) -> Tensor:
        """Return the sums of the C outer products, [B, H, S, D]."""
        return einsum("BCHS,BCSD->BHSD", self._by_term(a_BXS1), b_BCSD)

    def keys(self, held: Mapping[str, Tensor]) -> Tensor:
        return self._sum(held["a_k"], held["b_k"])

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], placed: PlacedRule) -> Tensor:
        if q_BHTD.shape[2] > 1 or torch.is_grad_enabled() or self.backend == "reference":
            v_BHSD = self._sum(held["a_v"], held["b_v"])
            return self.mix(q_BHTD, self.keys(held), v_BHSD, placed)
        # For one query, summing a (q . b) and (w a) b is less work; in place: no gradients.
        a_k_BCHS, a_v_BCHS = self._by_term(held["a_k"]), self._by_term(held["a_v"])
        score_BHS = (q_BHTD.transpose(1, 2) @ held["b_k"].mT).mul_(a_k_BCHS).sum(1)

        def by_term(w_BH1S: Tensor) -> Tensor:
            return (w_BH1S.transpose(1, 2) * a_v_BCHS).flatten(1, 2).unsqueeze(2)

        # The core gets each score as a key of size 1, and the query 1.
        one_BH11, k_BHS1 = torch.ones_like(q_BHTD[..., :1]), score_BHS.unsqueeze(3)
        y_BX1D = self.mix(one_BH11, k_BHS1, held["b_v"], placed, by_term)
        return y_BX1D.unflatten(1, (-1, self.num_heads)).sum(1)

    def flops(self, T: int, S: int) -> int:
        # Includes making queries, keys and values, which has no weights.
        C_q, C_k, C_v = self.ranks
        queries = 2 * T * self.d_out * C_q
        if T == 1 < S:  # sums over the factors themselves
            pairs = seen_pairs(T, S, self.rule())
            return queries + 2 * (self.d_out + self.num_heads) * (C_k + C_v) * pairs
        return super().flops(T, S) + queries + 2 * S * self.d_out * (C_k + C_v)
