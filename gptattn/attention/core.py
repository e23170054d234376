"""attend(): the single place where scores become outputs.

The backend `reference` is the definition: plain, readable, right in float64. The others must agree
with it in outputs and gradients. `sdpa` never holds all T x S scores: torch's fused attention does
what it can, blocks of queries do the rest. `flex` compiles the rule into one kernel on a GPU, and
decodes as `sdpa` does.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gptattn.attention.flex import by_flex, check_flex
from gptattn.attention.rule import Rule, Span, Standing, visible, weights
from gptattn.position.base import Positions

Backend = Literal["reference", "sdpa", "flex"]

# Weights [B, H, T, S] -> what the values are summed with: [B, H, T, S], or fewer heads.
Blend = Callable[[Tensor], Tensor]

BLOCK = 128  # queries at a time, where a mask or scores must be held in memory
MULTIPLE = 4  # head sizes that are multiples of this are fastest

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
    if backend == "reference":
        return by_scores(q_BHTD, k_BGSD, v_BGSD, rule, dropout, *at.whole(), at.known, blend)
    if blend is not None:
        return scores_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at, blend)
    if backend == "flex":
        check_flex(q_BHTD, rule, dropout)
        if at.same:  # positions change with each step of decoding, and a kernel would with them
            return by_flex(q_BHTD, k_BGSD, v_BGSD, rule, at.documents)
    if can_fuse(q_BHTD, v_BGSD, rule, dropout):
        if rule.decay is None:
            return by_sdpa(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)
        if at.T > 1:
            folded = fold_decay(q_BHTD, k_BGSD, v_BGSD, rule)
            return by_sdpa(*folded, dropout, at)[..., : v_BGSD.shape[3]]
    return scores_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)


def can_fuse(q_BHTD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float) -> bool:
    """Whether torch's fused attention can do this without holding T x S of anything."""
    if rule.softcap is not None or rule.bias is not None or rule.sink_H is not None:
        return False
    if q_BHTD.device.type != "cpu":
        return rule.decay is None
    # On a CPU it holds all T x S weights with dropout, or if values have another head size.
    if dropout > 0 or q_BHTD.shape[3] != v_BGSD.shape[3]:
        return False
    # A decay may be thousands: among a query's half-precision numbers it would be lost.
    single = q_BHTD.dtype.itemsize >= 4 and not torch.is_autocast_enabled("cpu")
    return rule.decay is None or single


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

    This holds BLOCK x S scores, and skips keys that no query of a block sees.
    """
    again = torch.is_grad_enabled()
    k, v = _in_pieces(k_BGSD, rule, at), _in_pieces(v_BGSD, rule, at)
    done = []
    # Not slices, whose gradients are as large as the whole.
    blocks = zip(q_BHTD.split(BLOCK, dim=2), at.blocks(BLOCK, rule.window), strict=True)
    for q, (query, key) in blocks:
        inputs = q, _part(k, key.where), _part(v, key.where)
        rest = rule, dropout, query, key, at.known, blend
        if again:
            drops = dropout > 0  # the recomputation must drop the same weights
            y = checkpoint(by_scores, *inputs, *rest, use_reentrant=False, preserve_rng_state=drops)
        else:
            y = by_scores(*inputs, *rest)
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
    k, v = _in_pieces(k_BGSD, rule, at), _in_pieces(v_BGSD, rule, at)
    done = []
    # Not slices, whose gradients are as large as the whole.
    blocks = zip(q_BHTD.split(BLOCK, dim=2), at.blocks(BLOCK, rule.window), strict=True)
    for q, (query, key) in blocks:
        mask = None if at.T == 1 and at.newest else visible(rule, query, key)
        # A softmax over no keys is NaN on some devices: let a query that sees none see all, then
        # zero its output. On a CPU it is 0.
        lost = None
        if mask is not None and not at.known and not on_cpu:
            lost = ~mask.any(dim=-1, keepdim=True)
            mask = mask | lost
        inputs = q, _part(k, key.where), _part(v, key.where)
        with nullcontext() if on_cpu else sdpa_kernel(WITHOUT_CUDNN):
            y = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **options)
        done.append(y if lost is None else y.masked_fill(lost, 0.0))
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def _in_pieces(x_BGSD: Tensor, rule: Rule, at: Standing) -> tuple[Tensor, ...]:
    """Return keys or values as a whole, or in pieces of BLOCK where a window trains.

    The gradient of a slice is as large as the whole, so time per token would grow with T.
    """
    if rule.window is None or at.T <= BLOCK or not torch.is_grad_enabled():
        return (x_BGSD,)
    return x_BGSD.split(BLOCK, dim=2)


def _part(pieces: tuple[Tensor, ...], where: slice) -> Tensor:
    """Return the part `where` of what `_in_pieces` returned."""
    if len(pieces) == 1:
        return pieces[0][:, :, where]
    low = where.start // BLOCK
    near = torch.cat(pieces[low : -(-where.stop // BLOCK)], dim=2)
    return near[:, :, where.start - low * BLOCK : where.stop - low * BLOCK]


def fold_decay(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Rule]:
    """Return queries, keys and values of a larger D, and a rule without decay, for the same result.

    The outputs' first D numbers count, the others are 0. Keys stay one per group: each of its R
    query heads has a column of its own for -c_key, and its queries have a 1 there. With it the char
    model trains 1.2 times as fast.

    The columns come first and the scale lies in the queries, because a product that sums in order
    then begins with c_query - c_key, which is exact where it matters: c itself may be thousands. A
    c of more digits than the queries have is split in two, and each half has its columns.
    """
    if rule.decay is None:
        return q_BHTD, k_BGSD, v_BGSD, rule
    B, H, T = q_BHTD.shape[:3]
    G, S = k_BGSD.shape[1:3]
    c_BHT, c_BHS = rule.decay.at_query_BHT, rule.decay.at_key_BHS
    wide = torch.promote_types(c_BHT.dtype, c_BHS.dtype)
    own_HR = torch.eye(H // G, dtype=q_BHTD.dtype, device=q_BHTD.device).repeat(G, 1)
    own_BHTR = own_HR[None, :, None].expand(B, H, T, H // G)
    one_BGS1 = k_BGSD.new_ones(B, G, S, 1)
    halves = [_halves(c.to(wide), q_BHTD.dtype) for c in (c_BHT, c_BHS)]
    of_q, of_k = [], []
    for at_query, at_key in zip(*halves, strict=True):
        of_q += [at_query.expand(B, H, T)[..., None], own_BHTR]
        of_k += [one_BGS1, -at_key.expand(B, H, S).unflatten(1, (G, H // G)).mT]
    q = torch.cat([*of_q, q_BHTD * rule.scale], dim=-1)
    k = torch.cat([*of_k, k_BGSD], dim=-1)
    rest = -q.shape[3] % MULTIPLE
    q, k = (F.pad(x, (0, rest)) if rest else x for x in (q, k))
    # Fused attention wants one size for all three.
    v = F.pad(v_BGSD, (0, q.shape[3] - v_BGSD.shape[3]))
    return q, k, v, replace(rule, scale=1.0, decay=None)


def _halves(c: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return numbers of this dtype whose sum is c; the gradient goes through the first."""
    high = c.to(dtype)
    if torch.promote_types(c.dtype, dtype) == dtype:
        return [high]
    return [high, (c - high).detach().to(dtype)]
