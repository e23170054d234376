"""attend(): the single place where scores become outputs.

The backend `reference` is the definition: plain, readable, right in float64. The others must agree
with it in outputs and gradients. `sdpa` never holds all T x S scores: torch's fused attention does
what it can, blocks of queries do the rest. `flex` compiles the rule into one kernel on a GPU, and
decodes as `sdpa` does.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gptattn.attention.flex import by_flex, check_flex
from gptattn.attention.rule import Rule, Span, Standing, weights
from gptattn.position.base import Positions

Backend = Literal["reference", "sdpa", "flex"]

# Weights [B, H, T, S] -> what the values are summed with: [B, H, T, S], or fewer heads.
Blend = Callable[[Tensor], Tensor]

BLOCK = 128  # queries at a time, where a mask or scores must be held in memory

# cuDNN's kernel, which torch prefers on Hopper, may round dropout to sixteenths and makes a plan
# for every shape: while decoding, for every token (pytorch#174245, transformers#48163).
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    blend: Blend | None = None,
) -> Tensor:
    """Return attention outputs [B, H, T, D of v] under `rule`; zeros for a query that sees no key.

    `q_pos` and `k_pos` are the positions of the T queries and S keys: ranges, which are fastest
    because the host knows their values, or tensors, in any order, where -1 marks an entry without a
    token, or the same `Documents`, which do not see each other. By default T = S, and both count
    from 0. `dropout` acts on the weights after the softmax; pass 0 outside training. `blend`
    changes the weights after that; where it leaves fewer heads, outputs have that many, and v's
    heads divide them. Raises ValueError if the numbers of positions and tokens differ.
    """
    at = Standing(q_pos, k_pos, q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device)
    fits_fused = blend is None and can_fuse(q_BHTD, v_BGSD, rule, dropout)
    if backend == "flex" and blend is None:
        check_flex(q_BHTD, rule, dropout)
        if at.same:  # positions change with each step of decoding, and a kernel would with them
            return by_flex(q_BHTD, k_BGSD, v_BGSD, rule, at.documents)
    # One query's scores fit in memory: the definition itself decodes.
    if backend == "reference" or (at.T == 1 and not fits_fused):
        return by_scores(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at, *at.whole(), blend)
    if fits_fused:
        return by_sdpa(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)
    return scores_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at, blend)


def can_fuse(q_BHTD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float) -> bool:
    """Whether torch's fused attention can do this without holding T x S of anything."""
    if rule.changes_scores:
        return False
    # On a CPU it holds all T x S weights with dropout, or if values have another head size.
    return q_BHTD.device.type != "cpu" or (dropout == 0 and q_BHTD.shape[3] == v_BGSD.shape[3])


def by_scores(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    dropout: float,
    at: Standing,
    query: Span,
    key: Span,
    blend: Blend | None = None,
) -> Tensor:
    """The definition: weights from all scores, dropout, `blend`, weighted sum of the values."""
    w_BHTS = F.dropout(weights(q_BHTD, k_BGSD, rule, at, query, key), dropout)
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
    """Apply the definition to BLOCK queries at a time; backward computes each of several again.

    This holds BLOCK x S scores, and skips keys that no query of a block sees.
    """
    again = torch.is_grad_enabled() and at.T > BLOCK
    done = []
    for q, k, v, query, key in split_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, at):
        call = q, k, v, rule, dropout, at, query, key, blend
        if again:
            drops = dropout > 0  # the recomputation must drop the same weights
            y = checkpoint(by_scores, *call, use_reentrant=False, preserve_rng_state=drops)
        else:
            y = by_scores(*call)
        done.append(y)
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def by_sdpa(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float, at: Standing
) -> Tensor:
    """Return attention outputs by torch's fused attention, for a rule without changed scores.

    Plain causal attention is one call; otherwise BLOCK queries at a time see their keys through a
    mask.
    """
    on_cpu, grouped = q_BHTD.device.type == "cpu", k_BGSD.shape[1] != q_BHTD.shape[1]
    options = {"dropout_p": dropout, "scale": rule.scale, "enable_gqa": grouped}
    all_past = rule.window is None or rule.window >= at.S
    if at.same and all_past and at.documents is None:
        trains = torch.is_grad_enabled() and dropout == 0
        with nullcontext() if on_cpu or trains else sdpa_kernel(WITHOUT_CUDNN):
            inputs = q_BHTD, k_BGSD, v_BGSD
            return F.scaled_dot_product_attention(*inputs, is_causal=True, **options)
    done = []
    for q, k, v, query, key in split_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, at):
        mask = at.mask(rule, query, key)
        # A softmax over no keys is NaN on some devices: let a query that sees none see all, then
        # zero its output. On a CPU it is 0.
        lost = None
        if mask is not None and not at.known and not on_cpu:
            lost = ~mask.any(dim=-1, keepdim=True)
            mask = mask | lost
        with nullcontext() if on_cpu else sdpa_kernel(WITHOUT_CUDNN):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        done.append(y if lost is None else y.masked_fill(lost, 0.0))
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def split_in_blocks(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, at: Standing
) -> Iterator[tuple[Tensor, Tensor, Tensor, Span, Span]]:
    """Yield BLOCK queries at a time, the keys and values that they may see, and where both stand.

    The gradient of a slice is as large as the whole, so with a window, time per token would grow
    with T: where that trains, keys and values are split too, and joined again for each block. For
    one layer of GPT-2 small with a window of 256, that takes 0.4 times the time at T = 16,384.
    """
    splits = rule.window is not None and at.T > BLOCK and torch.is_grad_enabled()
    pieces = [x.split(BLOCK, dim=2) if splits else () for x in (k_BGSD, v_BGSD)]
    blocks = zip(q_BHTD.split(BLOCK, dim=2), at.blocks(BLOCK, rule.window), strict=True)
    for q, (query, key) in blocks:
        where, k, v = key.where, k_BGSD, v_BGSD
        if splits:
            first, last = where.start // BLOCK, -(-where.stop // BLOCK)
            where = slice(where.start - first * BLOCK, where.stop - first * BLOCK)
            k, v = (torch.cat(of_all[first:last], dim=2) for of_all in pieces)
        yield q, k[:, :, where], v[:, :, where], query, key
