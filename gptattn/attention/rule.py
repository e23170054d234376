"""Which keys a query sees, and what happens to its scores; every backend must follow this."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, einsum

from gptattn.attention.spans import Span, Standing
from gptattn.position.base import Positions

# (queries, keys) -> what is added to their scores: [B, H, T, S], any size may be 1; -inf hides.
Bias = Callable[[Span, Span], Tensor]


@dataclass(frozen=True)
class Decay:
    """A running sum c per head over the tokens; c_query - c_key is added to a score.

    With c = -slope * position it is ALiBi's bias, with c = the sum of log forget gates the one of
    forgetting attention. The sizes B and H may be 1.
    """

    at_query_BHT: Tensor
    at_key_BHS: Tensor


@dataclass(frozen=True)
class Rule:
    """A query at position i sees the keys at positions 0 <= j <= i, with a window only the newest.

    Of rows of several documents it sees those of its own document.

    score = cap(scale * q k^T) + decay + bias, with cap(s) = softcap * tanh(s / softcap); the mask
    comes after these, the softmax last. Raises ValueError for an impossible value; the message
    starts with the field.

    window: number of keys that a query sees, its own included: i - window < j <= i.
    decay: a bias that is a difference of one number per query and one per key; see `Decay`.
    bias: may use tensors of its layer from a closure; they get their gradients.
    sink_H: one logit per head that takes part in the softmax but has no value, so its share of the
    weight is lost. It is neither scaled nor capped.

    Sources: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.1; window: Beltagy et al. 2020,
    arXiv:2004.05150; soft cap: Gemma 2, arXiv:2408.00118; sink: gpt-oss 2025.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    bias: Bias | None = None
    sink_H: Tensor | None = None
    decay: Decay | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(
                f"scale={self.scale} must be a positive number; null: the mechanism's own"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be 1 or more: the token itself, or None")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap} must be a positive number, or None")

    @property
    def changes_scores(self) -> bool:
        """Whether scores get more than the scale and the mask: a soft cap, bias, decay or sink."""
        added = (self.softcap, self.bias, self.decay, self.sink_H)
        return any(value is not None for value in added)

    def with_decay(self, at_query_BHT: Tensor, at_key_BHS: Tensor) -> "Rule":
        """Return this rule with another decay, added to the one that it may have."""
        if self.decay is not None:
            at_query_BHT = self.decay.at_query_BHT + at_query_BHT
            at_key_BHS = self.decay.at_key_BHS + at_key_BHS
        return replace(self, decay=Decay(at_query_BHT, at_key_BHS))

    def of_head(self, h: int) -> "Rule":
        """Return the rule of query head h alone."""
        bias, sink_H, decay = self.bias, self.sink_H, self.decay
        if bias is not None:
            bias = partial(_bias_of_head, bias, h)
        if sink_H is not None:
            sink_H = sink_H[h : h + 1]
        if decay is not None:
            c_BHT, c_BHS = decay.at_query_BHT, decay.at_key_BHS
            decay = Decay(_head(c_BHT, h, axis=-2), _head(c_BHS, h, axis=-2))
        return replace(self, bias=bias, sink_H=sink_H, decay=decay)


def _bias_of_head(bias: Bias, h: int, query: Span, key: Span) -> Tensor:
    return _head(bias(query, key), h, axis=-3)


def _head(x: Tensor, h: int, axis: int) -> Tensor:
    """Return head h of x; x is the same for all heads if it has no such axis, or one of size 1."""
    return x if x.ndim < -axis or x.shape[axis] == 1 else x.narrow(axis, h, 1)


def visible(rule: Rule, query: Span, key: Span) -> Tensor:
    """Return a mask [B or 1, 1, T, S]: True where the query sees the key."""
    # A key without a token (position -1) moves behind every query, so none sees it.
    k_pos = key.pos.masked_fill(key.pos < 0, torch.iinfo(torch.int64).max)
    seen = k_pos <= query.pos
    if rule.window is not None:
        seen = seen & (k_pos > query.pos - rule.window)
    if query.document is None or key.document is None:
        return seen
    return seen & (query.document == key.document)


def weights(
    q_BHTD: Tensor, k_BGSD: Tensor, rule: Rule, query: Span, key: Span, certain: bool
) -> Tensor:
    """Return softmax(scores) [B, H, T, S]; a query that sees no key has weights of 0.

    `certain`: every query is known to see a key. Source of the groups: Ainslie et al. 2023,
    arXiv:2305.13245, sec. 2.2.
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
    score_BHTS = score_BHTS.masked_fill(~visible(rule, query, key), -math.inf)
    if rule.sink_H is not None:
        sink_H11 = rule.sink_H.to(score_BHTS.dtype)[:, None, None]
        sink_BHT1 = sink_H11.expand(*score_BHTS.shape[:3], 1)
        return torch.cat([score_BHTS, sink_BHT1], dim=-1).softmax(dim=-1)[..., :-1]
    if certain and rule.bias is None:
        return score_BHTS.softmax(dim=-1)
    nothing = (score_BHTS == -math.inf).all(dim=-1, keepdim=True)
    return score_BHTS.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)


def attention_weights(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    rule: Rule,
    *,
    q_pos: Positions | None = None,
    k_pos: Positions | None = None,
) -> Tensor:
    """Return the weights [B, H, T, S] that `attend` gives the keys, before dropout."""
    at = Standing(q_pos, k_pos, q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device)
    return weights(q_BHTD, k_BGSD, rule, *at.whole(), at.known)
