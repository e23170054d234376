"""Which keys a query sees, and what happens to its scores; every backend must follow this.

`Rule` is the definition, `Span` a block of queries or keys with their positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, einsum

from gptattn.position.base import Documents, Positions


@dataclass(frozen=True)
class Span:
    """A contiguous block of the queries, or of the keys, that `attend` was given.

    Its tensors broadcast over [B, H, T, S], so a bias is plain arithmetic: ALiBi's is
    `slope_H11 * (key.pos - query.pos)`.
    """

    positions: Positions  # of all queries, or of all keys
    where: slice  # those in this block, n of them
    across: int  # the axis of size 1: -1 for queries, -2 for keys
    device: torch.device

    @property
    def pos(self) -> Tensor:
        """Positions [B or 1, 1, n, 1] of queries, [B or 1, 1, 1, n] of keys; -1: no token.

        If a row holds several documents, each token's position in its document.
        """
        if isinstance(self.positions, range):
            first = self.positions.start
            start, stop = first + self.where.start, first + self.where.stop
            return self._across(torch.arange(start, stop, device=self.device))
        positions = self.positions
        if isinstance(positions, Documents):
            positions = positions.position_BT
        return self._across(positions[..., self.where])

    @property
    def document(self) -> Tensor | None:
        """Where each token's document begins in its row, shaped like `pos`; None: one per row."""
        if isinstance(self.positions, Documents):
            return self._across(self.positions.start_BT[..., self.where])
        return None

    def _across(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 1, x.shape[-1]).unsqueeze(self.across)

    def of(self, x_BHN: Tensor) -> Tensor:
        """Return this block's part of x, which has one value per query (or key) of `attend`.

        B and H can be 1. The shape is [B, H, n, 1] for queries, [B, H, 1, n] for keys.
        """
        return x_BHN[..., self.where].unsqueeze(self.across)


# (queries, keys) -> the bias on their scores: [B, H, T, S], any size can be 1; -inf hides.
Bias = Callable[[Span, Span], Tensor]


@dataclass(frozen=True)
class Decay:
    """A running sum c per head over the tokens; c_query - c_key is added to a score.

    c = -slope * position gives ALiBi's bias; the sum of log forget gates gives forgetting
    attention's. B and H can be 1.
    """

    at_query_BHT: Tensor
    at_key_BHS: Tensor


@dataclass(frozen=True)
class Rule:
    """A query at position i sees the keys at positions 0 <= j <= i; with a window, the newest.

    If a row holds several documents, a query sees only its own.

    score = cap(scale * q k^T) + decay + bias, with cap(s) = softcap * tanh(s / softcap). Then comes
    the mask, then the softmax.

    window: number of keys that a query sees, its own included: i - window < j <= i.
    chunk: number of positions in a chunk; a query sees only its own chunk: i // chunk = j // chunk.
    decay: a bias that is a difference of one number per query and one per key; see `Decay`.
    bias: can use its layer's tensors from a closure; they get gradients.
    sink_H: one logit per head that takes part in the softmax but has no value, so its share of the
    weight is lost. It is neither scaled nor capped.

    Sources: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.1; window: Beltagy et al. 2020,
    arXiv:2004.05150; chunk: Llama 4 2025; soft cap: Gemma 2, arXiv:2408.00118; sink: gpt-oss 2025.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    bias: Bias | None = None
    sink_H: Tensor | None = None
    decay: Decay | None = None
    chunk: int | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether scores get more than the scale and the mask: a soft cap, bias, decay or sink."""
        added = (self.softcap, self.bias, self.decay, self.sink_H)
        return any(value is not None for value in added)

    def with_decay(self, at_query_BHT: Tensor, at_key_BHS: Tensor) -> "Rule":
        """Return this rule with this decay added to any that it has."""
        if self.decay is not None:
            at_query_BHT = self.decay.at_query_BHT + at_query_BHT
            at_key_BHS = self.decay.at_key_BHS + at_key_BHS
        return replace(self, decay=Decay(at_query_BHT, at_key_BHS))


def place(
    q_pos: Positions | None, k_pos: Positions | None, T: int, S: int, device: torch.device
) -> tuple[Span, Span]:
    """Return the spans of all T queries and all S keys; by default T = S, both counting from 0.

    Raises ValueError if the numbers of positions and tokens differ.
    """
    if T != S and (q_pos is None or k_pos is None):
        raise ValueError(
            f"{T} queries and {S} keys differ in number; pass q_pos and k_pos to place them"
        )
    q_pos = range(T) if q_pos is None else q_pos
    k_pos = range(S) if k_pos is None else k_pos
    for name, positions, count in (("q_pos", q_pos, T), ("k_pos", k_pos, S)):
        if isinstance(positions, range):
            length = positions.stop - positions.start  # torch.compile has no len() of unknown ends
        elif isinstance(positions, Documents):
            length = positions.start_BT.shape[1]
        else:
            length = positions.shape[-1]
        if length != count:
            raise ValueError(f"{name} has {length} positions for {count} tokens")
    if q_pos is not k_pos and Documents in (type(q_pos), type(k_pos)):
        raise ValueError("q_pos and k_pos must be the same Documents object; pass one for both")
    return Span(q_pos, slice(0, T), -1, device), Span(k_pos, slice(0, S), -2, device)


def are_newest(query: Span, key: Span) -> bool:
    """Whether the queries are known to be the last of the keys' tokens, so each sees itself."""
    q_pos, k_pos = query.positions, key.positions
    if isinstance(q_pos, range) and isinstance(k_pos, range):
        return q_pos.stop == k_pos.stop and q_pos.start >= k_pos.start
    return isinstance(q_pos, Documents)


def visible(rule: Rule, query: Span, key: Span) -> Tensor | None:
    """Return a mask [B or 1, 1, T, S]: True where the query sees the key; None: it sees all."""
    count = key.where.stop - key.where.start
    is_only_query = query.where.stop == 1
    fits = rule.chunk is None and (rule.window is None or count <= rule.window)
    if is_only_query and are_newest(query, key) and fits:
        return None
    # A key without a token (position -1) moves after every query, so none sees it.
    k_pos = key.pos.masked_fill(key.pos < 0, torch.iinfo(torch.int64).max)
    seen = k_pos <= query.pos
    if rule.window is not None:
        seen = seen & (k_pos > query.pos - rule.window)
    if rule.chunk is not None:
        seen = seen & (k_pos // rule.chunk == query.pos // rule.chunk)
    if query.document is None or key.document is None:
        return seen
    return seen & (query.document == key.document)


def weights(q_BHTD: Tensor, k_BGSD: Tensor, rule: Rule, query: Span, key: Span) -> Tensor:
    """Return softmax(scores) [B, H, T, S]; a query that sees no key has weights of 0.

    Source of the groups: Ainslie et al. 2023, arXiv:2305.13245, sec. 2.2.
    """
    q_BGRTD = q_BHTD.unflatten(1, (k_BGSD.shape[1], -1))
    score_BHTS = einsum("BGRTD,BGSD->BGRTS", q_BGRTD, k_BGSD).flatten(1, 2) * rule.scale
    if rule.softcap is not None:
        score_BHTS = rule.softcap * torch.tanh(score_BHTS / rule.softcap)
    if rule.decay is not None:
        c_BHT1, c_BH1S = query.of(rule.decay.at_query_BHT), key.of(rule.decay.at_key_BHS)
        score_BHTS = score_BHTS + (c_BHT1 - c_BH1S).to(score_BHTS.dtype)
    if rule.bias is not None:
        score_BHTS = score_BHTS + rule.bias(query, key).to(score_BHTS.dtype)
    mask = visible(rule, query, key)
    if mask is not None:
        score_BHTS = score_BHTS.masked_fill(~mask, -math.inf)
    if rule.sink_H is not None:
        sink_H11 = rule.sink_H.to(score_BHTS.dtype)[:, None, None]
        sink_BHT1 = sink_H11.expand(*score_BHTS.shape[:3], 1)
        return torch.cat([score_BHTS, sink_BHT1], dim=-1).softmax(dim=-1)[..., :-1]
    if are_newest(query, key) and rule.bias is None:
        return score_BHTS.softmax(dim=-1)
    blind = (score_BHTS == -math.inf).all(dim=-1, keepdim=True)
    return score_BHTS.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)


def attention_weights(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    rule: Rule,
    q_pos: Positions | None = None,
    k_pos: Positions | None = None,
) -> Tensor:
    """Return the weights [B, H, T, S] that `attend` gives the keys, before dropout."""
    query, key = place(q_pos, k_pos, q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device)
    return weights(q_BHTD, k_BGSD, rule, query, key)
