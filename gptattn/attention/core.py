"""attend(): the single place where scores become outputs.

`reference` is the definition: plain, readable, right in float64. `sdpa` must agree with it in
outputs and gradients; it never holds T x S scores and never copies keys or values per group.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from torch.utils.checkpoint import checkpoint

from gptattn.attention.rule import Rule, visible, weights
from gptattn.attention.spans import Span, Standing
from gptattn.position.base import Positions

Backend = Literal["reference", "sdpa"]
BLOCK = 128  # queries at a time, where scores or a mask must exist at all


def check_backend(backend: Backend) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend} is unknown; one of {list(get_args(Backend))}")


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    *,
    q_pos: Positions | None = None,
    k_pos: Positions | None = None,
    dropout: float = 0.0,
    backend: Backend = "sdpa",
) -> Tensor:
    """Attention by `rule` [B, H, T, D of v]; a query that sees no key gives zeros.

    `q_pos` of the T queries and `k_pos` of the S keys are ranges, which is quickest as the host
    knows what they hold, or tensors, in which any order will do and -1 is not there. Without them
    T = S, and both count from 0. `dropout` acts on the weights after the softmax; pass 0 outside
    training. Raises ValueError where positions and tokens differ in number.
    """
    at = Standing(q_pos, k_pos, q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device)
    if backend == "reference":
        return _by_scores(q_BHTD, k_BGSD, v_BGSD, rule, dropout, *at.whole(), at.known)
    # With dropout, torch's CPU sdpa leaves its flash path and holds all T x S weights.
    if rule.changes_scores or (dropout > 0 and q_BHTD.device.type == "cpu"):
        return _scores_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)
    # A window that holds all keys is none.
    if at.same and (rule.window is None or rule.window >= at.S):
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            dropout_p=dropout,
            is_causal=True,
            scale=rule.scale,
            enable_gqa=k_BGSD.shape[1] != q_BHTD.shape[1],
        )
    if at.newest and at.T == 1 and rule.window is None:  # it sees all keys
        return _folded(q_BHTD, k_BGSD, v_BGSD, rule.scale, dropout, None)
    return _masked_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)


def _by_scores(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    dropout: float,
    query: Span,
    key: Span,
    certain: bool,
) -> Tensor:
    """The definition."""
    w_BHTS = F.dropout(weights(q_BHTD, k_BGSD, rule, query, key, certain), dropout)
    w_BGRTS = w_BHTS.unflatten(1, (v_BGSD.shape[1], -1))
    return einsum("BGRTS,BGSD->BGRTD", w_BGRTS, v_BGSD).flatten(1, 2)


def _scores_in_blocks(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float, at: Standing
) -> Tensor:
    """The definition on BLOCK queries at a time, each block computed again in backward.

    This holds BLOCK x S, skips keys that no query of a block sees, and with dropout is faster than
    torch's own (measured at T = 1,024: 0.88 of it).
    """
    done = []
    for query, key in at.blocks(BLOCK, rule.window):
        inputs = q_BHTD[:, :, query.where], k_BGSD[:, :, key.where], v_BGSD[:, :, key.where]
        rest = rule, dropout, query, key, at.known
        if torch.is_grad_enabled():
            again = dropout > 0  # the same weights must be dropped again
            y_BHTD = checkpoint(
                _by_scores, *inputs, *rest, use_reentrant=False, preserve_rng_state=again
            )
        else:
            y_BHTD = _by_scores(*inputs, *rest)
        done.append(y_BHTD)
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def _masked_in_blocks(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float, at: Standing
) -> Tensor:
    """torch's sdpa on BLOCK queries at a time, each block with a mask and the keys it may see."""
    done = []
    for query, key in at.blocks(BLOCK, rule.window):
        inputs = q_BHTD[:, :, query.where], k_BGSD[:, :, key.where], v_BGSD[:, :, key.where]
        mask = visible(rule, query, key)
        if at.known:
            done.append(_folded(*inputs, rule.scale, dropout, mask))
            continue
        # A softmax over nothing would be NaN: who sees nothing looks at all, and gets zeros.
        seen = mask.any(dim=-1, keepdim=True)
        y_BHTD = _folded(*inputs, rule.scale, dropout, mask | ~seen)
        done.append(y_BHTD.masked_fill(~seen, 0.0))
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def _folded(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float,
    dropout: float,
    mask: Tensor | None,
) -> Tensor:
    """The R heads of a group as R * T query rows of one: keys and values are read once a group."""
    B, H, T, D = q_BHTD.shape
    G = k_BGSD.shape[1]
    y_BGXD = F.scaled_dot_product_attention(
        q_BHTD.reshape(B, G, H // G * T, D),
        k_BGSD,
        v_BGSD,
        attn_mask=None if mask is None else mask.repeat(1, 1, H // G, 1),
        dropout_p=dropout,
        scale=scale,
    )
    return y_BGXD.reshape(B, H, T, v_BGSD.shape[3])
