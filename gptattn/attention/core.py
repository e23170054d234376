"""attend(): the single place where scores become outputs.

The backend `reference` is the definition: plain, readable, right in float64. The others must agree
with it in outputs and gradients. `sdpa` never holds all T x S scores: torch's fused attention does
what it can, blocks of queries do the rest. `flex` compiles the rule into one kernel on a GPU, and
decodes as `sdpa` does. In a layer, `auto` is `sdpa`, until `choose_backend` says more.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

from gptattn.attention.base import Masks, Reach
from gptattn.attention.rule import Rule, Span, are_newest, place, visible, weights
from gptattn.position.base import Documents, Positions

Backend = Literal["auto", "reference", "sdpa", "flex"]

# Weights [B, H, T, S] -> what the values are summed with: [B, H, T, S], or fewer heads.
Blend = Callable[[Tensor], Tensor]

BLOCK = 128  # queries at a time, where a mask or scores must be held in memory

GPUS = ("cuda",)  # on a CPU, where layers are checked, flex has no gradients

# cuDNN's kernel, which torch prefers on Hopper, may round dropout to sixteenths and makes a plan
# for every shape: while decoding, for every token (pytorch#174245, transformers#48163).
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def is_gpu(x: Tensor) -> bool:
    """Return whether x is on a device with kernels that fuse scores and what changes them."""
    return x.device.type in GPUS


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    q_pos: Positions | None = None,
    k_pos: Positions | None = None,
    masks: Masks | None = None,
    *,
    dropout: float = 0.0,
    backend: Backend = "sdpa",
    blend: Blend | None = None,
) -> Tensor:
    """Return attention outputs [B, H, T, D of v] under `rule`; zeros for a query that sees no key.

    Each of the G key/value heads is read by H / G query heads.

    `q_pos` and `k_pos` are the positions of the T queries and S keys: ranges, which are fastest
    because the host knows their values, or tensors, in any order, where -1 marks an entry without a
    token, or the same `Documents`, which do not see each other. By default T = S, and both count
    from 0. `dropout` acts on the weights after the softmax; pass 0 outside training. `blend`
    changes the weights after that; where it leaves fewer heads, outputs have that many, and v's
    heads divide them. flex makes its block mask, or finds it in `masks`; where those lack it, it
    computes as sdpa. Raises ValueError if the numbers of positions and tokens differ.
    """
    T, S, on_cpu = q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device.type == "cpu"
    query, key = place(q_pos, k_pos, T, S, q_BHTD.device)
    same_tokens = T == S and are_newest(query, key)
    if backend == "flex" and blend is None:
        check_flex(rule, dropout)
        # Positions change with each step of decoding, and a kernel would with them.
        if same_tokens and is_gpu(q_BHTD):
            reach = rule.window, rule.chunk
            at = query.positions, query.device
            mask = make_block_mask(T, reach, *at) if masks is None else masks.get(reach)
            if mask is not None:
                return by_flex(q_BHTD, k_BGSD, v_BGSD, rule, mask)
    # On a CPU fused attention holds all T x S weights with dropout, or for values of another size.
    holds_weights = on_cpu and (dropout > 0 or q_BHTD.shape[3] != v_BGSD.shape[3])
    fuses = blend is None and not rule.changes_scores and not holds_weights
    # One query's scores fit in memory: the definition itself decodes.
    if backend == "reference" or (T == 1 and not fuses):
        return by_scores(q_BHTD, k_BGSD, v_BGSD, rule, dropout, query, key, blend)
    at = query.positions
    sees_all_past = isinstance(at, range) and (rule.window is None or rule.window >= S)
    if isinstance(at, range) and rule.chunk is not None:
        sees_all_past = at.stop <= rule.chunk
    if fuses and same_tokens and sees_all_past:
        return by_sdpa(q_BHTD, k_BGSD, v_BGSD, rule, dropout, query, key, is_causal=True)
    # BLOCK queries at a time hold BLOCK x S scores, and skip keys that no query of a block sees.
    blocks = []
    for q, k, v, q_span, k_span in split_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, query, key):
        if fuses:
            y = by_sdpa(q, k, v, rule, dropout, q_span, k_span)
        elif torch.is_grad_enabled() and T > BLOCK:  # backward computes a block's scores again
            drops = dropout > 0  # and must drop the same weights
            call = by_scores, q, k, v, rule, dropout, q_span, k_span, blend
            y = checkpoint(*call, use_reentrant=False, preserve_rng_state=drops)
        else:
            y = by_scores(q, k, v, rule, dropout, q_span, k_span, blend)
        blocks.append(y)
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def by_scores(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    dropout: float,
    query: Span,
    key: Span,
    blend: Blend | None,
) -> Tensor:
    """The definition: weights from all scores, dropout, `blend`, weighted sum of the values."""
    w_BHTS = F.dropout(weights(q_BHTD, k_BGSD, rule, query, key), dropout)
    if blend is not None:
        w_BHTS = blend(w_BHTS)
    w_BGRTS = w_BHTS.unflatten(1, (v_BGSD.shape[1], -1))
    return einsum("BGRTS,BGSD->BGRTD", w_BGRTS, v_BGSD).flatten(1, 2)


def by_sdpa(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    dropout: float,
    query: Span,
    key: Span,
    is_causal: bool = False,
) -> Tensor:
    """Return attention outputs by torch's fused attention, for a rule without changed scores.

    Queries see their keys through a mask or, with `is_causal`, all of the past.
    """
    on_cpu, mask, lost = q_BHTD.device.type == "cpu", None, None
    if not is_causal:
        mask = visible(rule, query, key)
        # A softmax over no keys is NaN on some devices: let a query that sees none see all, then
        # zero its output. On a CPU it is 0.
        if mask is not None and not on_cpu and not are_newest(query, key):
            lost = ~mask.any(dim=-1, keepdim=True)
            mask = mask | lost
    shared = k_BGSD.shape[1] != q_BHTD.shape[1]
    unusual = q_BHTD.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    unusual = unusual or q_BHTD.shape[3] != v_BGSD.shape[3]
    if shared and unusual and q_BHTD.device.type == "cuda":
        # There torch 2.11 may have no fused kernel for shared heads, and hold all T x S scores.
        R, shared = q_BHTD.shape[1] // k_BGSD.shape[1], False
        k_BGSD, v_BGSD = k_BGSD.repeat_interleave(R, 1), v_BGSD.repeat_interleave(R, 1)
    trains = is_causal and torch.is_grad_enabled() and dropout == 0
    with nullcontext() if on_cpu or trains else sdpa_kernel(WITHOUT_CUDNN):
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=rule.scale,
            enable_gqa=shared,
        )
    return y_BHTD if lost is None else y_BHTD.masked_fill(lost, 0.0)


def split_in_blocks(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, query: Span, key: Span
) -> Iterator[tuple[Tensor, Tensor, Tensor, Span, Span]]:
    """Yield BLOCK queries at a time, the keys and values that they may see, and where both stand.

    The gradient of a slice is as large as the whole, so with a window, time per token would grow
    with T: where that trains, keys and values are split too, and joined again for each block. For
    one layer of GPT-2 small with a window of 256, that takes 0.4 times the time at T = 16,384.
    """
    T, S, known = q_BHTD.shape[2], k_BGSD.shape[2], are_newest(query, key)
    splits = rule.window is not None and T > BLOCK and torch.is_grad_enabled()
    pieces = [x.split(BLOCK, dim=2) if splits else () for x in (k_BGSD, v_BGSD)]
    for begin, q in zip(range(0, T, BLOCK), q_BHTD.split(BLOCK, dim=2), strict=True):
        end, first, last = begin + q.shape[2], 0, S
        if known:
            last = S - T + end
            first = 0 if rule.window is None else max(0, S - T + begin - rule.window + 1)
        where, k, v = slice(first, last), k_BGSD, v_BGSD
        spans = replace(query, where=slice(begin, end)), replace(key, where=where)
        if splits:
            left, right = first // BLOCK, -(-last // BLOCK)
            where = slice(first - left * BLOCK, last - left * BLOCK)
            k, v = (torch.cat(of_all[left:right], dim=2) for of_all in pieces)
        yield q, k[:, :, where], v[:, :, where], *spans


def check_flex(rule: Rule, dropout: float) -> None:
    """Raise ValueError for what this lacks: a bias from a function, and dropout."""
    if rule.bias is not None:
        raise ValueError("backend=flex takes no bias from a function; use sdpa")
    if dropout > 0:
        raise ValueError(f"backend=flex has no dropout, given {dropout}; use sdpa, or dropout 0")


def by_flex(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, mask: BlockMask) -> Tensor:
    """Return attention outputs [B, H, T, D of v] of T queries to the keys of the same tokens.

    `mask` hides keys, and must agree with `rule`. Source: Dong et al. 2024, arXiv:2412.05496.
    """
    if torch.is_autocast_enabled(q_BHTD.device.type):  # torch 2.11 leaves that to its callers
        dtype = torch.get_autocast_dtype(q_BHTD.device.type)
        q_BHTD, k_BGSD, v_BGSD = (x.to(dtype) for x in (q_BHTD, k_BGSD, v_BGSD))
    # Compiled with its block or, as eager code would hold all scores, alone.
    alone = not torch.compiler.is_compiling()
    attention: Callable[..., Any] = flex_attention
    if alone:
        attention = compile_alone(flex_attention, dynamic=False)
    with torch.compiler.set_stance("default") if alone else nullcontext():
        y_BHTD, more = attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            score_mod=_score_mod(rule, q_BHTD),
            block_mask=mask,
            scale=rule.scale,
            enable_gqa=k_BGSD.shape[1] != q_BHTD.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    if rule.sink_H is None:
        return y_BHTD
    # Unlike the CPU's fused operator, this one has a gradient of its log-sum-exp.
    kept_BHT = torch.sigmoid(more.lse - rule.sink_H[:, None].to(more.lse.dtype))
    return y_BHTD * kept_BHT[..., None].to(y_BHTD.dtype)


@cache
def compile_alone(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Return the function compiled by itself, in whatever it is called."""
    return torch.compile(function, dynamic=dynamic)


def _score_mod(rule: Rule, q_BHTD: Tensor) -> Callable[..., Tensor] | None:
    softcap, decay = rule.softcap, rule.decay

    def cap(score: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    if decay is None:
        return None if softcap is None else lambda score, b, h, t, s: cap(score)
    # Sums in float64, as sums of two numbers in float32: kernels are slow in float64.
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    c_t, c_s = (x.expand(q_BHTD.shape[:3]) for x in (decay.at_query_BHT, decay.at_key_BHS))
    high_t, high_s = c_t.to(dtype), c_s.to(dtype)
    low_t, low_s = (c_t - high_t).to(dtype), (c_s - high_s).to(dtype)

    def changed(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        score = cap(score) + (low_t[b, h, t] - low_s[b, h, s])  # first: so it fits in registers
        return score + (high_t[b, h, t] - high_s[b, h, s])

    return changed


@lru_cache(maxsize=16)
def make_block_mask(T: int, reach: Reach, positions: Positions, device: torch.device) -> BlockMask:
    """Return flex's mask of T tokens: which blocks of keys the blocks of queries see.

    Blocks without a pair in one document are skipped.
    """
    window, chunk = reach
    start_BT = positions.start_BT if isinstance(positions, Documents) else None

    def seen(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        start = 0 if start_BT is None else start_BT[b, t]
        near = (s >= start) & (s <= t)
        near = near if window is None else near & (s > t - window)
        return near if chunk is None else near & ((t - start) // chunk == (s - start) // chunk)

    alone = device.type == "cuda" and not torch.compiler.is_compiling()
    make = compile_alone(create_block_mask) if alone else create_block_mask
    rows = None if start_BT is None else len(start_BT)
    with torch.inference_mode(False):  # a validation's serves in training, too
        return make(seen, rows, None, T, T, device=device)
