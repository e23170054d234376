"""Softmax attention with a sink, by torch's fused operator for CPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash_with_sink(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    sink: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return attention outputs [B, H, T, D of v], on a CPU; a query that sees no key gives zeros.

    sink: logits [H, 1] or [H, T] that take part in the softmax and have no value. mask, 4-D: True
    where a query sees a key, or numbers that are added to the scores, without a gradient. causal:
    query t sees the keys up to t.
    """
    if torch.is_autocast_enabled("cpu"):  # which does not know this operator
        narrow = torch.get_autocast_dtype("cpu")
        q_BHTD, k_BGSD, v_BGSD = (x.to(narrow) for x in (q_BHTD, k_BGSD, v_BGSD))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q_BHTD.dtype).masked_fill(~mask, -torch.inf)
    D, size = q_BHTD.shape[3], v_BGSD.shape[3]
    if D != size:  # the operator wants one size
        q_BHTD, k_BGSD, v_BGSD = (
            F.pad(x, (0, max(D, size) - x.shape[3])) for x in (q_BHTD, k_BGSD, v_BGSD)
        )
    y_BHTD: Any = _FlashWithSink.apply(q_BHTD, k_BGSD, v_BGSD, sink, mask, causal, scale)
    return y_BHTD[..., :size]


class _FlashWithSink(torch.autograd.Function):
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
        sink: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        y, lse = _forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        # Where a query sees nothing, y and lse are 0, which serves as well as -inf.
        whole = torch.logaddexp(lse, sink.to(lse.dtype))
        y = y * (lse - whole).exp().unsqueeze(-1).to(y.dtype)
        ctx.save_for_backward(q, k, v, sink, mask, y, whole)
        ctx.causal, ctx.scale = causal, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, mask, y, whole = ctx.saved_tensors
        dq, dk, dv = _backward(
            dy, q, k, v, y, whole, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        d_sink = None
        if ctx.needs_input_grad[3]:
            weight = (sink.to(whole.dtype) - whole).exp()
            lost = weight * (dy.to(whole.dtype) * y).sum(-1)
            d_sink = -lost.sum_to_size(sink.shape).to(sink.dtype)
        return dq, dk, dv, d_sink, None, None, None
