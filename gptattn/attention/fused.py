"""attend() by torch's fused attention: which queries and keys go into one call of it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.attention.base import divisors
from gptattn.attention.flash import flash
from gptattn.attention.folding import fold_decay, one_size
from gptattn.attention.gpu_kernels import gpu_attention
from gptattn.attention.pieces import Band
from gptattn.attention.rule import Rule, visible
from gptattn.attention.spans import Span, Standing

BLOCK = 128  # queries at a time, where a mask or scores must be held in memory


def can_fuse(q_BHTD: Tensor, rule: Rule, dropout: float) -> bool:
    """Whether fused attention can do this at all, without holding T x S of anything."""
    on_cpu = q_BHTD.device.type == "cpu"
    if rule.softcap is not None or rule.bias is not None:
        return False
    # With dropout, torch's CPU sdpa leaves its flash path and holds all T x S weights.
    if on_cpu and dropout > 0:
        return False
    if rule.sink_H is not None and not on_cpu:  # the operator with a log-sum-exp is the CPU's
        return False
    if rule.decay is None:
        return True
    # c may be thousands: among a query's half-precision numbers it would be lost.
    return on_cpu and q_BHTD.dtype.itemsize >= 4 and not torch.is_autocast_enabled("cpu")


def fused(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float, at: Standing
) -> Tensor:
    """Return what `attend` does, for a rule that `can_fuse`."""
    if rule.decay is not None:
        # A mask is no copy of the keys, which decoding must not make, but it has no gradient.
        if at.T <= BLOCK and not torch.is_grad_enabled():
            return _masked_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)
        wide = fold_decay(q_BHTD, k_BGSD, v_BGSD, rule)
        return fused(*wide, dropout, at)[..., : v_BGSD.shape[3]]
    window = None if rule.window is None or rule.window >= at.S else rule.window
    on_cpu = q_BHTD.device.type == "cpu"
    plain = at.same and window is None and rule.sink_H is None and at.documents is None
    if plain:
        inputs = q_BHTD, k_BGSD, v_BGSD
        if not on_cpu:
            return gpu_attention(*inputs, rule.scale, dropout, causal=True)
        y_BHTD = F.scaled_dot_product_attention(
            *one_size(*inputs),
            dropout_p=dropout,
            is_causal=True,
            scale=rule.scale,
            enable_gqa=k_BGSD.shape[1] != q_BHTD.shape[1],
        )
        return y_BHTD[..., : v_BGSD.shape[3]]
    banded = at.same if window is None else at.known and at.T > 1
    # Which pieces documents need is for the host to see, which a compiled function cannot.
    if at.documents is not None and torch.compiler.is_compiling():
        banded = False
    if on_cpu and banded:
        sink_H1 = None if rule.sink_H is None else rule.sink_H[:, None]
        start_BT = None if at.documents is None else at.documents.start_BT
        inputs = q_BHTD, k_BGSD, v_BGSD
        band = Band(window, at.ahead)
        return flash(*inputs, rule.scale, band=band, start_BT=start_BT, sink=sink_H1)
    return _masked_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)


def _masked_in_blocks(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float, at: Standing
) -> Tensor:
    """Use BLOCK queries at a time, with a mask over the keys that they may see."""
    done = []
    for query, key in at.blocks(BLOCK, rule.window):
        inputs = q_BHTD[:, :, query.where], k_BGSD[:, :, key.where], v_BGSD[:, :, key.where]
        seen = None if at.sees_all(rule.window) else visible(rule, query, key)
        mask = seen if rule.decay is None else _decayed(rule, query, key, seen, q_BHTD.dtype)
        # A softmax over no keys is NaN on some devices: let a query that sees none see all, then
        # zero its output. On a CPU it is 0.
        lost = None
        if mask is not None and not at.known and q_BHTD.device.type != "cpu":
            lost = ~mask.any(dim=-1, keepdim=True)
            mask = mask | lost
        y_BHTD = _folded(*inputs, rule, dropout, mask)
        done.append(y_BHTD if lost is None else y_BHTD.masked_fill(lost, 0.0))
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def _decayed(rule: Rule, query: Span, key: Span, seen: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a mask [B, H, T, S] that adds the decay and hides what is not seen; sizes may be 1."""
    assert rule.decay is not None
    c_BHTS = query.of(rule.decay.at_query_BHT) - key.of(rule.decay.at_key_BHS)
    return (c_BHTS if seen is None else c_BHTS.masked_fill(~seen, -torch.inf)).to(dtype)


def _folded(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    dropout: float,
    mask: Tensor | None,
) -> Tensor:
    """Attend with a group's R query heads as R * T queries of one head.

    Keys and values are then read once per group instead of once per query head.
    """
    B, H, T, D = q_BHTD.shape
    G = k_BGSD.shape[1]
    R = H // G
    if mask is None and G == 1 and B > 0 and q_BHTD.device.type == "cpu":
        # The kernel has one thread per row and key head: each thread gets a view, and part of the
        # queries. With several heads, folded as they are, these would be copies.
        threads = torch.get_num_threads()
        G = next((n for n in divisors(R) if n * B >= threads), R)
        R //= G
        k_BGSD, v_BGSD = (x.expand(-1, G, -1, -1) for x in (k_BGSD, v_BGSD))
    q_BGXD = q_BHTD.reshape(B, G, R * T, D)
    if mask is not None and R > 1:
        of_heads = mask.shape[1] > 1
        mask = mask.unflatten(1, (G, R)).flatten(2, 3) if of_heads else mask.repeat(1, 1, R, 1)
    if q_BHTD.device.type != "cpu":  # without sinks, see `can_fuse`
        y_BGXD = gpu_attention(q_BGXD, k_BGSD, v_BGSD, rule.scale, dropout, mask=mask)
    elif rule.sink_H is None:
        X = q_BGXD.shape[2]
        if X == 1 and q_BHTD.dtype == torch.bfloat16:
            # torch multiplies a single row of bfloat16 half as fast as two.
            q_BGXD = q_BGXD.expand(-1, -1, 2, -1)
        y_BGXD = F.scaled_dot_product_attention(
            q_BGXD, k_BGSD, v_BGSD, attn_mask=mask, dropout_p=dropout, scale=rule.scale
        )[:, :, :X]
    else:
        sink_H = rule.sink_H
        sink_GX = None if sink_H is None else sink_H.repeat_interleave(T).view(G, R * T)
        y_BGXD = flash(q_BGXD, k_BGSD, v_BGSD, rule.scale, mask=mask, sink=sink_GX)
    return y_BGXD.reshape(B, H, T, v_BGSD.shape[3])
