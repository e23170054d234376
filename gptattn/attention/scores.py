"""attend() by scores in memory: the definition, for all queries or for a block at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from torch.utils.checkpoint import checkpoint

from gptattn.attention.rule import Rule, weights
from gptattn.attention.spans import Span, Standing

# Weights [B, H, T, S] -> what the values are summed with: [B, H, T, S], or fewer heads.
Blend = Callable[[Tensor], Tensor]

BLOCK = 128  # queries at a time


def by_scores(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    dropout: float,
    query: Span,
    key: Span,
    certain: bool,
    blend: Blend | None = None,
) -> Tensor:
    """The definition: weights from all scores, dropout, `blend`, weighted sum of the values."""
    w_BHTS = F.dropout(weights(q_BHTD, k_BGSD, rule, query, key, certain), dropout)
    if blend is not None:
        w_BHTS = blend(w_BHTS)
    w_BGRTS = w_BHTS.unflatten(1, (v_BGSD.shape[1], -1))
    return einsum("BGRTS,BGSD->BGRTD", w_BGRTS, v_BGSD).flatten(1, 2)


def scores_in_blocks(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    dropout: float,
    at: Standing,
    blend: Blend | None = None,
) -> Tensor:
    """Apply the definition to BLOCK queries at a time, and compute each block again in backward.

    This holds BLOCK x S scores, skips keys that no query of a block sees, and with dropout is
    faster than torch's sdpa (0.88 of its time, measured at T = 1,024).
    """
    again = torch.is_grad_enabled()
    far = rule.window is None or at.T <= BLOCK or not again
    whole = (k_BGSD,), (v_BGSD,)
    k, v = whole if far else (x.split(BLOCK, dim=2) for x in (k_BGSD, v_BGSD))
    done = []
    blocks = at.blocks(BLOCK, rule.window)
    for q_block, (query, key) in zip(q_BHTD.split(BLOCK, dim=2), blocks, strict=True):
        inputs = q_block, k, v, rule, dropout, query, key, at.known, blend
        if again:
            drops = dropout > 0  # the recomputation must drop the same weights
            y = checkpoint(_block, *inputs, use_reentrant=False, preserve_rng_state=drops)
        else:
            y = _block(*inputs)
        done.append(y)
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def _block(
    q_BHTD: Tensor,
    k: tuple[Tensor, ...],
    v: tuple[Tensor, ...],
    rule: Rule,
    dropout: float,
    query: Span,
    key: Span,
    certain: bool,
    blend: Blend | None,
) -> Tensor:
    inputs = _part(k, key.where), _part(v, key.where), rule, dropout, query, key, certain, blend
    return by_scores(q_BHTD, *inputs)


def _part(pieces: tuple[Tensor, ...], where: slice) -> Tensor:
    """Return the part `where` of keys that come as a whole, or in pieces of BLOCK.

    The gradient of a part of the whole is as large as the whole, which pieces avoid: with a window,
    time per token would grow with T.
    """
    if len(pieces) == 1:
        return pieces[0][:, :, where]
    low = where.start // BLOCK
    near = torch.cat(pieces[low : -(-where.stop // BLOCK)], dim=2)
    return near[:, :, where.start - low * BLOCK : where.stop - low * BLOCK]
