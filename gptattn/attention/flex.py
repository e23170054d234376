"""attend() by torch's FlexAttention, which compiles a rule into one kernel on a GPU."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from gptattn.attention.rule import Rule
from gptattn.position.base import Documents, Positions


def check_flex(rule: Rule, dropout: float) -> None:
    """Raise ValueError for what this lacks: a bias from a function, chunks, and dropout."""
    if rule.bias is not None:
        raise ValueError("backend=flex takes no bias from a function; use sdpa")
    if rule.chunk is not None:
        raise ValueError(f"backend=flex takes no chunk={rule.chunk}; use sdpa")
    if dropout > 0:
        raise ValueError(f"backend=flex has no dropout, given {dropout}; use sdpa, or dropout 0")


def by_flex(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule, positions: Positions
) -> Tensor:
    """Return attention outputs [B, H, T, D of v] of T queries to the keys of the same tokens.

    Blocks whose queries and keys share no document are skipped.

    Source: Dong et al. 2024, arXiv:2412.05496.
    """
    B, H, T, _ = q_BHTD.shape
    on_gpu = q_BHTD.device.type == "cuda"
    attention: Callable[..., Any] = _compiled() if on_gpu else flex_attention
    documents = positions if isinstance(positions, Documents) else None
    y_BHTD, more = attention(
        q_BHTD,
        k_BGSD,
        v_BGSD,
        score_mod=_score_mod(rule, B, H, T),
        block_mask=_mask(T, rule.window, q_BHTD.device, documents),
        scale=rule.scale,
        enable_gqa=k_BGSD.shape[1] != H,
        return_aux=AuxRequest(lse=True),
    )
    if rule.sink_H is None:
        return y_BHTD
    # Unlike the CPU's fused operator, this one has a gradient of its log-sum-exp.
    kept_BHT = torch.sigmoid(more.lse - rule.sink_H[:, None].to(more.lse.dtype))
    return y_BHTD * kept_BHT[..., None].to(y_BHTD.dtype)


def _score_mod(rule: Rule, B: int, H: int, T: int) -> Callable[..., Tensor] | None:
    softcap, decay = rule.softcap, rule.decay
    if softcap is None and decay is None:
        return None
    c_query = None if decay is None else decay.at_query_BHT.expand(B, H, T)
    c_key = None if decay is None else decay.at_key_BHS.expand(B, H, T)

    def changed(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if c_query is not None and c_key is not None:
            score = score + (c_query[b, h, t] - c_key[b, h, s])
        return score

    return changed


@lru_cache(maxsize=16)
def _mask(
    T: int, window: int | None, device: torch.device, documents: Documents | None
) -> BlockMask:
    start_BT = None if documents is None else documents.start_BT

    def seen(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        near = s <= t if window is None else (s <= t) & (s > t - window)
        return near if start_BT is None else near & (s >= start_BT[b, t])

    # Compiled, it never builds a T x T mask.
    make: Callable[..., BlockMask] = (
        torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    )
    rows = None if start_BT is None else len(start_BT)
    return make(seen, rows, None, T, T, device=device)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)
