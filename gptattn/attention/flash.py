"""Windows, documents and sinks on a CPU, by torch's fused operator and its own backward."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptattn.attention.folding import one_size
from gptattn.attention.pieces import Band, Piece, pieces_of
from gptattn.attention.stretches import Stretch, stretches_of

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float,
    *,
    band: Band | None = None,
    start_BT: Tensor | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return attention outputs [B, H, T, D of v], on a CPU; a query that sees no key gives zeros.

    With a band that has a window, time and memory per token do not depend on T. start_BT, with a
    band: where in its row each token's document begins. mask, 4-D, instead of a band: True
    where a query sees a key, or numbers that are added to the scores, without a gradient. With
    neither, every query sees every key. sink: logits [H, 1] or [H, T] that take part in the softmax
    and have no value.
    """
    if torch.is_autocast_enabled("cpu"):  # which does not know this operator
        narrow = torch.get_autocast_dtype("cpu")
        q_BHTD, k_BGSD, v_BGSD = (x.to(narrow) for x in (q_BHTD, k_BGSD, v_BGSD))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q_BHTD.dtype).masked_fill(~mask, -torch.inf)
    inputs = *one_size(q_BHTD, k_BGSD, v_BGSD), sink, mask, start_BT
    y_BHTD: Any = _Flash.apply(*inputs, band, scale)
    return y_BHTD[..., : v_BGSD.shape[3]]


class _Flash(torch.autograd.Function):
    """The operator gives no gradient of its log-sum-exp, so autograd alone would give a wrong one.

    With the sink in output and log-sum-exp, the operator's own backward is right as it stands: it
    computes weights exp(score - lse), and the sink, having no value, is in dy . y nowhere else.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        mask: Tensor | None,
        start: Tensor | None,
        band: Band | None,
        scale: float,
    ) -> Tensor:
        B, H, T, D = q.shape
        # In memory as the operator's own outputs are, and as the heads are merged.
        y = q.new_empty(B, T, H, D).transpose(1, 2)
        lse = q.new_empty(B, T, H, 1, dtype=_wide(q.dtype)).transpose(1, 2)
        for piece in _calls(q, k, band, start):
            inputs = piece.queries(q), piece.keys(k), piece.keys(v)
            added = mask if band is None else piece.limits(band, q)
            causal = band is not None and added is None
            y_rows, lse_rows = _forward(*inputs, 0.0, causal, attn_mask=added, scale=scale)
            piece.queries_put(y, y_rows)
            piece.queries_put(lse, lse_rows[..., None])
        if sink is not None:
            # Where a query sees nothing, y and lse are 0, which serves as well as -inf.
            whole = torch.logaddexp(lse, sink[..., None].to(lse.dtype))
            y.mul_((lse - whole).exp())
            lse = whole
        ctx.save_for_backward(q, k, v, sink, mask, start, y, lse)
        ctx.band, ctx.scale = band, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, mask, start, y, lse = ctx.saved_tensors
        band, scale = ctx.band, ctx.scale
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for piece in _calls(q, k, band, start):
            inputs = piece.queries(dy), piece.queries(q), piece.keys(k), piece.keys(v)
            done = piece.queries(y), piece.queries(lse)[..., 0]
            added = mask if band is None else piece.limits(band, q)
            causal = band is not None and added is None
            more = {"attn_mask": added, "scale": scale}
            of_q, of_k, of_v = _backward(*inputs, *done, 0.0, causal, **more)
            piece.queries_put(dq, of_q)
            piece.keys_add(dk, of_k)
            piece.keys_add(dv, of_v)
        d_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            lost = (sink.to(lse.dtype) - lse[..., 0]).exp() * (dy.to(lse.dtype) * y).sum(-1)
            d_sink = -lost.sum_to_size(sink.shape).to(sink.dtype)
        return dq, dk, dv, d_sink, None, None, None, None


def _calls(
    q: Tensor, k: Tensor, band: Band | None, start: Tensor | None
) -> Iterable[Piece] | Iterable[Stretch]:
    if start is None or band is None:
        return pieces_of(q.shape[0], q.shape[2], k.shape[2], band)
    return stretches_of(start, band.window)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
