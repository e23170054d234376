"""attend(): the single place where scores become outputs.

The backend `reference` is the definition: plain, readable, right in float64. The others must agree
with it in outputs and gradients. `sdpa` never holds all T x S scores: it uses torch's fused
attention where it can, and blocks of queries elsewhere. `flex` compiles the rule into one GPU
kernel, and decodes with `sdpa`. In a layer, `auto` means `sdpa` until `choose_backend` decides.
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

# Weights [B, H, T, S] -> the weights that sum the values: [B, H, T, S], or another number of heads.
Blend = Callable[[Tensor], Tensor]

BLOCK = 128  # queries at a time, where a mask or scores must be in memory

GPUS = ("cuda",)  # no CPU: layers are checked there, and flex has no gradients there

# torch prefers cuDNN's kernel on Hopper. It may round dropout to sixteenths, and makes a plan for
# every shape: one per token while decoding (pytorch#174245, transformers#48163).
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def is_gpu(x: Tensor) -> bool:
    """Return whether x is on a device with kernels that fuse scores and changes to them."""
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

    H / G query heads read each of the G key/value heads.

    `q_pos` and `k_pos` are the positions of the T queries and S keys: ranges, which are fastest
    because the host knows their values; tensors, in any order, with -1 for an entry without a
    token; or one `Documents` for both, which keeps documents apart. By default T = S, and both
    count from 0. `dropout` acts on the weights after the softmax; pass 0 outside training. `blend`
    then changes the weights; if it merges heads, the outputs have as many heads as it returns, a
    multiple of v's. flex looks its block mask up in `masks`, and computes as sdpa if `masks` lacks
    it; if `masks` is None, it makes one. Raises ValueError if positions don't match tokens.
    """
    T, S, on_cpu = q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device.type == "cpu"
    query, key = place(q_pos, k_pos, T, S, q_BHTD.device)
    same_tokens = T == S and are_newest(query, key)
    if backend == "flex" and blend is None:
        check_flex(rule, dropout)
        # Positions change at each decoding step, and each change would need a new kernel.
        if same_tokens and is_gpu(q_BHTD):
            reach = rule.window, rule.chunk
            where = query.positions, query.device
            mask = make_block_mask(T, reach, *where) if masks is None else masks.get(reach)
            if mask is not None:
                return by_flex(q_BHTD, k_BGSD, v_BGSD, rule, mask)
    # On a CPU, fused attention holds all T x S weights with dropout, or for values of another size.
    holds_weights = on_cpu and (dropout > 0 or q_BHTD.shape[3] != v_BGSD.shape[3])
    fuses = blend is None and not rule.changes_scores and not holds_weights
    # One query's scores fit in memory, so decoding uses the definition itself.
    if backend == "reference" or (T == 1 and not fuses):
        return by_scores(q_BHTD, k_BGSD, v_BGSD, rule, dropout, query, key, blend)
    positions = query.positions
    sees_all_past = isinstance(positions, range) and (
        (rule.window or S) >= S and positions.stop <= (rule.chunk or positions.stop)
    )
    if fuses and same_tokens and sees_all_past:
        return by_sdpa(q_BHTD, k_BGSD, v_BGSD, rule, dropout, query, key, is_causal=True)
    # A block of queries holds BLOCK x S scores, and skips keys that none of its queries sees.
    blocks = []
    for q, k, v, q_span, k_span in split_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, query, key):
        if fuses:
            y = by_sdpa(q, k, v, rule, dropout, q_span, k_span)
        elif torch.is_grad_enabled() and T > BLOCK:  # backward recomputes a block's scores
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
    """Return attention outputs by torch's fused attention, for a rule that doesn't change scores.

    A mask says which keys a query sees; with `is_causal`, it sees its whole past.
    """
    on_cpu, mask, blind = q_BHTD.device.type == "cpu", None, None
    if not is_causal:
        mask = visible(rule, query, key)
        # A softmax over no keys is NaN on some devices: let a query that sees none see all, then
        # zero its output. On a CPU it is 0.
        if mask is not None and not on_cpu and not are_newest(query, key):
            blind = ~mask.any(dim=-1, keepdim=True)
            mask = mask | blind
    shared = k_BGSD.shape[1] != q_BHTD.shape[1]
    unusual = q_BHTD.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    unusual = unusual or q_BHTD.shape[3] != v_BGSD.shape[3]
    if shared and unusual and q_BHTD.device.type == "cuda":
        # torch 2.11 may lack a fused kernel for shared heads here, and hold all T x S scores.
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
    return y_BHTD if blind is None else y_BHTD.masked_fill(blind, 0.0)


def split_in_blocks(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, query: Span, key: Span
) -> Iterator[tuple[Tensor, Tensor, Tensor, Span, Span]]:
    """Yield BLOCK queries at a time, the keys and values that they can see, and the spans of both.

    A slice's gradient is as large as the whole tensor, so with a window, training time per token
    would grow with T. There, keys and values are split too, and joined again for each block. One
    layer of GPT-2 small with a window of 256 then takes 0.4 times as long at T = 16,384.
    """
    T, S, newest = q_BHTD.shape[2], k_BGSD.shape[2], are_newest(query, key)
    splits = rule.window is not None and T > BLOCK and torch.is_grad_enabled()
    pieces = [x.split(BLOCK, dim=2) if splits else () for x in (k_BGSD, v_BGSD)]
    for begin, q in zip(range(0, T, BLOCK), q_BHTD.split(BLOCK, dim=2), strict=True):
        end, first, last = begin + q.shape[2], 0, S
        if newest:
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
    """Raise ValueError for what flex lacks: a bias from a function, and dropout."""
    if rule.bias is not None:
        raise ValueError("backend=flex cannot use a bias from a function; use sdpa")
    if dropout > 0:
        raise ValueError(f"backend=flex has no dropout (here {dropout}); use sdpa, or dropout=0")


def by_flex(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, mask: BlockMask) -> Tensor:
    """Return attention outputs [B, H, T, D of v] for queries and keys of the same T tokens.

    `mask` hides keys, and must agree with `rule`. Source: Dong et al. 2024, arXiv:2412.05496.
    """
    if torch.is_autocast_enabled(q_BHTD.device.type):  # torch 2.11 leaves the cast to its callers
        dtype = torch.get_autocast_dtype(q_BHTD.device.type)
        q_BHTD, k_BGSD, v_BGSD = (x.to(dtype) for x in (q_BHTD, k_BGSD, v_BGSD))
    # If its block isn't compiled, compile it alone: eager code would hold all scores.
    alone = not torch.compiler.is_compiling()
    attention: Callable[..., Any] = flex_attention
    if alone:
        attention = compile_alone(flex_attention, dynamic=False)
    with torch.compiler.set_stance("default") if alone else nullcontext():
        y_BHTD, aux = attention(
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
    # Unlike the CPU's fused operator, this one can differentiate its log-sum-exp.
    share_BHT = torch.sigmoid(aux.lse - rule.sink_H[:, None].to(aux.lse.dtype))
    return y_BHTD * share_BHT[..., None].to(y_BHTD.dtype)


@cache
def compile_alone(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Return the function compiled by itself, whatever calls it."""
    return torch.compile(function, dynamic=dynamic)


def _score_mod(rule: Rule, q_BHTD: Tensor) -> Callable[..., Tensor] | None:
    softcap, decay = rule.softcap, rule.decay

    def cap(score: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    if decay is None:
        return None if softcap is None else lambda score, b, h, t, s: cap(score)
    # Split each float64 sum into two float32 numbers: kernels are slow in float64.
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    c_t, c_s = (x.expand(q_BHTD.shape[:3]) for x in (decay.at_query_BHT, decay.at_key_BHS))
    high_t, high_s = c_t.to(dtype), c_s.to(dtype)
    low_t, low_s = (c_t - high_t).to(dtype), (c_s - high_s).to(dtype)

    def changed(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        score = cap(score) + (low_t[b, h, t] - low_s[b, h, s])  # first, to fit in registers
        return score + (high_t[b, h, t] - high_s[b, h, s])

    return changed


@lru_cache(maxsize=16)
def make_block_mask(T: int, reach: Reach, positions: Positions, device: torch.device) -> BlockMask:
    """Return flex's mask for T tokens: which blocks of keys each block of queries sees.

    Blocks that share no document are skipped.
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
    with torch.inference_mode(False):  # training can reuse validation's mask
        return make(seen, rows, None, T, T, device=device)
