"""attend() by torch's fused attention: which queries and keys go into one call of it."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.attention.decay import fold_decay
from gptattn.attention.flash import flash_with_sink
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
    everything = rule.window is None or rule.window >= at.S
    if at.same and everything:
        return _causal(q_BHTD, k_BGSD, v_BGSD, rule, dropout)
    if at.known and rule.window is not None and not everything and at.T > 1:
        return _banded(q_BHTD, k_BGSD, v_BGSD, rule, rule.window, dropout, at)
    return _masked_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)


def _causal(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float) -> Tensor:
    if rule.sink_H is not None:
        sink_H1 = rule.sink_H[:, None]
        return flash_with_sink(q_BHTD, k_BGSD, v_BGSD, sink_H1, rule.scale, causal=True)
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BGSD,
        v_BGSD,
        dropout_p=dropout,
        is_causal=True,
        scale=rule.scale,
        enable_gqa=k_BGSD.shape[1] != q_BHTD.shape[1],
    )


def _banded(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    window: int,
    dropout: float,
    at: Standing,
) -> Tensor:
    """Give blocks of C queries, and the keys that a block sees, as rows of one batch.

    Time and memory per token do not depend on T. Queries whose window reaches back to the first
    key, or beyond it, are not limited by it and go without.
    """
    T, ahead = at.T, at.ahead
    first = min(T, max(0, window - ahead))  # this many queries are not limited
    q_first, q_rest = q_BHTD.split([first, T - first], dim=2)
    done = []
    if first:
        S = ahead + first
        k, v = k_BGSD[:, :, :S], v_BGSD[:, :, :S]
        part = Standing(range(ahead, S), range(S), first, S, k.device)
        done.append(fused(q_first, k, v, replace(rule, window=None), dropout, part))
    if first < T:
        keys = slice(ahead + first - window + 1, ahead + T)
        k, v = k_BGSD[:, :, keys], v_BGSD[:, :, keys]
        done.append(_blocks_as_rows(q_rest, k, v, rule, window, dropout))
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def _blocks_as_rows(
    q_BHND: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, window: int, dropout: float
) -> Tensor:
    """Attend from N queries to S = window - 1 + N keys; the last query's own key is the last."""
    B, _, N, _ = q_BHND.shape
    # Blocks of half a window do a quarter more work than is seen, and copy each key three times.
    C = min(N, max(BLOCK // 2, -(-window // 32) * 16))
    count = -(-N // C)
    before = -(-(window - 1) // C)
    q_XHCD = _rows(q_BHND, C, count, 0)
    if count == 1:
        k_XGLD, v_XGLD = k_BGSD, v_BGSD
    else:
        k_XGLD, v_XGLD = (_rows(x, C, count, before) for x in (k_BGSD, v_BGSD))
    # Query i of a block sees its keys i to i + window - 1.
    seen_CL = q_BHND.new_ones(C, k_XGLD.shape[2], dtype=torch.bool).triu().tril(window - 1)
    y_XHCD = _folded(q_XHCD, k_XGLD, v_XGLD, rule, dropout, seen_CL[None, None])
    return y_XHCD.unflatten(0, (B, count)).transpose(1, 2).flatten(2, 3)[:, :, :N]


def _rows(x_BHND: Tensor, C: int, count: int, before: int) -> Tensor:
    """Return block b of `count` with the `before` blocks that follow it, as row b of each row.

    [B, H, N, D] -> [B * count, H, (1 + before) * C, D]; what is missing at the end is 0.
    """
    missing = (count + before) * C - x_BHND.shape[2]
    if missing:
        x_BHND = F.pad(x_BHND, (0, 0, 0, missing))
    x_BHMCD = x_BHND.unflatten(2, (count + before, C))
    shifted = [x_BHMCD[:, :, i : i + count] for i in range(before + 1)]
    x_BHMLD = shifted[0] if before == 0 else torch.cat(shifted, dim=3)
    return x_BHMLD.transpose(1, 2).flatten(0, 1)


def _masked_in_blocks(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, dropout: float, at: Standing
) -> Tensor:
    """Use BLOCK queries at a time, with a mask over the keys that they may see."""
    done = []
    for query, key in at.blocks(BLOCK, rule.window):
        inputs = q_BHTD[:, :, query.where], k_BGSD[:, :, key.where], v_BGSD[:, :, key.where]
        # The newest token alone sees every key that is left.
        seen = None if at.newest and at.T == 1 else visible(rule, query, key)
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


def _decayed(
    rule: Rule, query: Span, key: Span, seen: Tensor | None, dtype: torch.dtype
) -> Tensor:
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
    q_BGXD = q_BHTD.reshape(B, G, R * T, D)
    if mask is not None and R > 1:
        of_heads = mask.shape[1] > 1
        mask = mask.unflatten(1, (G, R)).flatten(2, 3) if of_heads else mask.repeat(1, 1, R, 1)
    if rule.sink_H is None:
        y_BGXD = F.scaled_dot_product_attention(
            q_BGXD, k_BGSD, v_BGSD, attn_mask=mask, dropout_p=dropout, scale=rule.scale
        )
    else:
        sink_GX = rule.sink_H.repeat_interleave(T).view(G, R * T)
        y_BGXD = flash_with_sink(q_BGXD, k_BGSD, v_BGSD, sink_GX, rule.scale, mask)
    return y_BGXD.reshape(B, H, T, v_BGSD.shape[3])
