"""DeepSeek Sparse Attention: latent attention to the keys that a light indexer chooses.

Letters besides those in `base.py`: C numbers of a latent, P of a rotated key, I heads of the
indexer, J numbers of each.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Unpack

import torch
from torch import Tensor, einsum, nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint

from gptattn.attention.base import Shared, window_of
from gptattn.attention.cache import Cache, Entry
from gptattn.attention.core import BLOCK, split_in_blocks
from gptattn.attention.linear import Linear
from gptattn.attention.rule import Rule, Span, place, visible, weights
from gptattn.attention.softmax import PlacedRule, SoftmaxOptions, Step, seen_pairs, split_heads
from gptattn.attention.variants.mla import MultiHeadLatentAttention
from gptattn.position.base import Positions
from gptattn.position.rope import Pairs, RotaryPosition

EPS = 1e-6  # in the norm of the indexer's keys, as in the authors' code
LOSS = "index_loss"


class DeepSeekSparseAttention(MultiHeadLatentAttention):
    """`MultiHeadLatentAttention` to only the `topk` keys with the highest index scores.

    x [B, T, d_in] -> y [B, T, d_out]. The score of a query and a key is
    sum_i w_i relu(q_i . k) / sqrt(I J), with queries q_i of I = index_heads heads from the queries'
    latent, one key k per token after a LayerNorm, and weights w_i from x. The first P = rope_dim
    numbers of both rotate in pairs as `index_pairs` says, whatever the main attention uses. Among
    equal scores, which ReLU causes, the newest keys are chosen.

    Below 1, index_heads is a share of num_heads, and topk a share of the context. index_dim=None:
    the size of a head. Raises ValueError for impossible sizes, and for backend=flex.

    The output gives the indexer no gradient. In training it learns from its own loss, "index_loss"
    in `Shared.losses`: the mean over queries of KL(p || softmax of the chosen keys' scores), in
    nats, where p is the main attention's weights, summed over its heads and normalised. That loss
    trains only the indexer.

    Source: DeepSeek-V3.2, arXiv:2512.02556, sec. 2.1; numbers as in DeepSeek-V3.2-Exp, without its
    Hadamard transform and 8-bit products, which change only the rounding.
    """

    stops_gradient: ClassVar[bool] = True
    chooses_keys: ClassVar[bool] = True

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        index_heads: float = 0.5,
        index_dim: int | None = None,
        index_pairs: Pairs = "half",
        topk: float = 0.25,
        kv_rank: float = 0.3333,
        query_rank: float | None = 0.6667,
        rope_dim: float | None = None,
        out_bias: bool = True,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        super().__init__(
            d_in,
            d_out,
            context_length,
            num_heads,
            kv_rank=kv_rank,
            query_rank=query_rank,
            rope_dim=rope_dim,
            out_bias=out_bias,
            **options,
        )
        self.topk = window_of(topk, context_length, "topk") or context_length
        self.index_heads = _heads(index_heads, num_heads)
        self.index_dim = self.head_dim if index_dim is None else index_dim
        if self.index_dim < max(1, self.rope_dim):
            raise ValueError(
                f"index_dim={self.index_dim} must hold the rope_dim={self.rope_dim} numbers that "
                f"rotate; give {max(1, self.rope_dim)} or more"
            )
        self.index_position = self.position
        if isinstance(self.position, RotaryPosition) and self.position.pairs != index_pairs:
            self.index_position = self.position.resized(self.rope_dim, index_pairs)
        source = d_in if self.query_rank is None else self.query_rank
        self.W_index_query = Linear(source, self.index_heads * self.index_dim, bias=False)
        self.W_index_key = Linear(d_in, self.index_dim, bias=False)
        self.index_norm = nn.LayerNorm(self.index_dim, EPS)
        self.W_index_weight = Linear(d_in, self.index_heads, bias=False)

    def entries(self, x_BTE: Tensor, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
        source_BTC = self.query_source(x_BTE)
        q_BHTX, new = self.entries_from(x_BTE, source_BTC, shared)
        # Detached: the indexer's loss trains only the indexer.
        return q_BHTX, new | self._index(x_BTE.detach(), source_BTC.detach(), shared)

    def _index(self, x_BTE: Tensor, source_BTC: Tensor, shared: Shared) -> dict[str, Tensor]:
        """Return the indexer's queries, the weights of its heads, and its keys."""
        q_BITJ = split_heads(self.W_index_query(source_BTC), self.index_heads)
        k_B1TJ = self.index_norm(self.W_index_key(x_BTE)).to(x_BTE.dtype).unsqueeze(1)
        P = self.rope_dim
        if self.index_position is not None and P > 0:
            q_BITP, k_B1TP = q_BITJ[..., :P], k_B1TJ[..., :P]
            q_BITP, k_B1TP = self.index_position.rotate(q_BITP, k_B1TP, shared.positions)
            q_BITJ = torch.cat([q_BITP, q_BITJ[..., P:]], dim=-1)
            k_B1TJ = torch.cat([k_B1TP, k_B1TJ[..., P:]], dim=-1)
        w_BTI = self.W_index_weight(x_BTE) * (self.index_heads * self.index_dim) ** -0.5
        w_BIT1 = w_BTI.transpose(1, 2).unsqueeze(-1)
        return {"index_query": q_BITJ, "index_weight": w_BIT1, "index_key": k_B1TJ}

    def cached(self) -> dict[str, Entry]:
        return super().cached() | {"index_key": Entry(1, self.index_dim)}

    def remember(
        self, new: Mapping[str, Tensor], cache: Cache | None, shared: Shared
    ) -> tuple[Mapping[str, Tensor], Positions]:
        held, k_pos = super().remember({name: new[name] for name in self.kept()}, cache, shared)
        return {**new, **held}, k_pos  # with the indexer's queries and weights, which aren't cached

    def project_and_cache(self, x_BTE: Tensor, cache: Cache | None, shared: Shared | None) -> Step:
        step = super().project_and_cache(x_BTE, cache, shared)
        q_BHTX, held, placed, *_ = step
        learning = self.training and torch.is_grad_enabled()
        if learning and shared is not None and shared.losses is not None:
            loss = self._index_loss(q_BHTX.detach(), held, placed)
            shared.losses.setdefault(LOSS, []).append(loss)
        if held["index_key"].shape[2] <= self.topk:
            return step  # all keys are chosen

        @torch.no_grad()
        def hide(query: Span, key: Span) -> Tensor:
            chosen_B1TS = self.choose(self.index_scores(held, placed.rule, query, key), key)
            hidden = torch.zeros_like(chosen_B1TS, dtype=q_BHTX.dtype)
            return hidden.masked_fill(~chosen_B1TS, -math.inf)

        return step._replace(placed=placed._replace(rule=replace(placed.rule, bias=hide)))

    def index_scores(
        self, held: Mapping[str, Tensor], rule: Rule, query: Span, key: Span
    ) -> Tensor:
        """Return the scores [B, 1, T, S] of these blocks, -inf for keys that a query cannot see."""
        q_BITJ = held["index_query"][:, :, query.where]
        w_BIT = held["index_weight"][:, :, query.where, 0]
        k_BSJ = held["index_key"][:, 0, key.where]
        score_BITS = relu(einsum("BITJ,BSJ->BITS", q_BITJ, k_BSJ))
        score_B1TS = einsum("BITS,BIT->BTS", score_BITS, w_BIT).unsqueeze(1)
        seen = visible(rule, query, key)
        return score_B1TS if seen is None else score_B1TS.masked_fill(~seen, -math.inf)

    def choose(self, score_B1TS: Tensor, key: Span) -> Tensor:
        """Return True at each query's `topk` highest scores; among equal ones, at the newest."""
        if score_B1TS.shape[-1] <= self.topk:
            return torch.ones_like(score_B1TS, dtype=torch.bool)
        least = score_B1TS.topk(self.topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        above, equal = score_B1TS > least, score_B1TS == least
        if isinstance(key.positions, Tensor):  # a ring is not in token order
            order_B11S = key.pos.argsort(dim=-1)
            rank = _count_back(equal.take_along_dim(order_B11S, dim=-1))
            rank = rank.take_along_dim(order_B11S.argsort(dim=-1), dim=-1)
        else:
            rank = _count_back(equal)
        return above | (equal & (rank <= self.topk - above.sum(-1, keepdim=True)))

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], placed: PlacedRule) -> Tensor:
        T, S = q_BHTD.shape[2], held["index_key"].shape[2]
        if T > 1 or self.topk >= S or placed.rule.decay is not None:
            return super().attend(q_BHTD, held, placed)
        # A decoding step reads only the chosen entries.
        query, key = place(placed.q_pos, placed.k_pos, T, S, q_BHTD.device)
        chosen_BS = self.choose(self.index_scores(held, placed.rule, query, key), key)[:, 0, 0]
        where_BK = chosen_BS.byte().topk(self.topk, sorted=False).indices
        row_B1 = torch.arange(len(where_BK), device=where_BK.device)[:, None]
        latent_B1KX = held["latent"][row_B1, 0, where_BK].unsqueeze(1)
        k_pos = key.pos.flatten(1).expand(chosen_BS.shape)[row_B1, where_BK]
        chosen = PlacedRule(replace(placed.rule, bias=None), placed.q_pos, k_pos)
        return super().attend(q_BHTD, {"latent": latent_B1KX}, chosen)

    def _index_loss(self, q_BHTX: Tensor, held: Mapping[str, Tensor], placed: PlacedRule) -> Tensor:
        """Return the mean divergence, computed in blocks of queries, as in `attend`."""
        with torch.no_grad():
            k_BHSX = self.keys(held)
        B, _, T, _ = q_BHTX.shape
        query, key = place(placed.q_pos, placed.k_pos, T, k_BHSX.shape[2], q_BHTX.device)
        sums = []
        for q, k, _, *spans in split_in_blocks(q_BHTX, k_BHSX, k_BHSX, placed.rule, query, key):
            call = self._divergence, q, k, held, placed.rule, *spans
            # With several blocks, backward recomputes a block's scores.
            sums.append(
                checkpoint(*call, use_reentrant=False, preserve_rng_state=False)
                if T > BLOCK
                else self._divergence(*call[1:])
            )
        return torch.stack(sums).sum() / (B * T)

    def _divergence(
        self,
        q_BHTX: Tensor,
        k_BHSX: Tensor,
        held: Mapping[str, Tensor],
        rule: Rule,
        query: Span,
        key: Span,
    ) -> Tensor:
        """Return the sum over these queries of KL(p || softmax of the chosen keys' scores)."""
        score_B1TS = self.index_scores(held, rule, query, key)
        chosen_B1TS = self.choose(score_B1TS.detach(), key) & (score_B1TS > -math.inf)
        with torch.no_grad():
            hidden = torch.zeros_like(score_B1TS).masked_fill(~chosen_B1TS, -math.inf)
            only_chosen = replace(rule, bias=lambda *_: hidden)
            p_B1TS = weights(q_BHTX, k_BHSX, only_chosen, query, key).sum(1, keepdim=True)
            p_B1TS = p_B1TS / p_B1TS.sum(-1, keepdim=True)  # sinks take a share of the weights
        log_q_B1TS = score_B1TS.masked_fill(~chosen_B1TS, -math.inf).log_softmax(-1)
        log_q_B1TS = log_q_B1TS.masked_fill(~chosen_B1TS, 0.0)
        return (torch.xlogy(p_B1TS, p_B1TS) - p_B1TS * log_q_B1TS).sum()

    def flops(self, T: int, S: int) -> int:
        """Return the FLOPs of the forms that run; see `Attention.flops`.

        A single decoding token attends only to the chosen keys. Several queries mask the others, so
        all pairs are computed. The indexer scores all pairs. Training counts three times this
        number. Its loss computes the main and the index scores once more; the main scores, and the
        index scores that choose keys, have no gradients, so they count a third.
        """
        seen = seen_pairs(T, S, self.rule())
        index = 2 * self.index_heads * (self.index_dim + 1) * seen
        if T < S or T == 1:
            return super().flops(T, min(S, self.topk) if T == 1 else S) + index
        scores = 2 * self.num_heads * (self.head_dim + self.rope_dim) * seen
        return super().flops(T, S) + (4 * index + scores) // 3


def _count_back(x: Tensor) -> Tensor:
    """Count the True values from each index to the end of the last axis."""
    return x.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)


def _heads(heads: float, num_heads: int) -> int:
    """Return the number of indexer heads; a share of num_heads, below 1, rounds to 1 or more."""
    if isinstance(heads, float) and 0 < heads < 1:
        return max(1, round(heads * num_heads))
    if not (isinstance(heads, int) and heads >= 1):
        raise ValueError(
            f"index_heads={heads} must be 1 or more, or, below 1, a share of num_heads={num_heads}"
        )
    return heads
