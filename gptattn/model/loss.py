"""Cross-entropy of a linear head that never holds all logits."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_AT_A_TIME = 2**25  # 128 MiB in float32
LOGITS_COMPILED = 2**30  # on a GPU: 2 GiB in half precision
LOGITS_EAGER = 2**28  # with two copies of them in float32
ALIGNED = 64  # if rows of logits aren't a multiple of this, a GPU's products are slower
IGNORED = -1  # the target of a position that is not scored


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int | None = None,
    to_gradient: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Mean cross-entropy in nats of softmax(hidden @ weight.T) against targets; a scalar.

    hidden [..., d], weight [V, d], targets [...] int64. Logits exist for at most `chunk_tokens`
    tokens at a time (default: at most LOGITS_AT_A_TIME logits; on a GPU LOGITS_EAGER, or
    LOGITS_COMPILED with `to_gradient`), in nearly equal chunks. The gradients of hidden and weight
    are computed in the same pass, so nothing is computed twice and backward can run only once.
    Under autocast the products run in the autocast dtype; the softmax, and the sum of the weight's
    gradient over chunks, are in float32. On a GPU, `to_gradient` turns logits into gradients in
    place: it is `logits_to_gradient`, plain or compiled. Raises ValueError if hidden states and
    targets differ in number, or if there are none.

    torch 2.13 has the same idea (`torch.nn.functional.linear_cross_entropy`); we support 2.11.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} differ in number of "
            "tokens"
        )
    tokens = targets.numel()
    if tokens == 0:
        raise ValueError(f"hidden {tuple(hidden.shape)} has no tokens, so there is no mean loss")
    most = _most_tokens(weight, to_gradient is not None) if chunk_tokens is None else chunk_tokens
    even = math.ceil(tokens / math.ceil(tokens / most))
    # Checked here, because inside forward() gradients are always off, and a parameter's
    # `requires_grad` is True even under no_grad.
    learning = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if hidden.is_cuda and to_gradient is None:
        to_gradient = logits_to_gradient
    return _LinearCrossEntropy.apply(
        hidden.flatten(0, -2), weight, targets.flatten(), even, learning, to_gradient
    )


def drop_ignored(hidden: Tensor, targets: Tensor, n: int, *labels: Tensor) -> tuple[Tensor, ...]:
    """Return hidden [n, d] and targets [n] of the n positions whose target is not IGNORED.

    hidden [..., d], targets [...]; any `labels` [...] are reduced in the same way. The head then
    costs nothing at the others. The caller knows n, so the host doesn't wait for a GPU to count.
    """
    where = (targets.flatten() != IGNORED).nonzero_static(size=n).squeeze(1)
    scored, *labelled = (one.flatten().index_select(0, where) for one in (targets, *labels))
    return hidden.flatten(0, -2).index_select(0, where), scored, *labelled


def find_hits(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int | None = None
) -> Tensor:
    """Return whether each target has the largest logit; arguments as in `linear_cross_entropy`."""
    most = _most_tokens(weight) if chunk_tokens is None else chunk_tokens
    chunks = zip(hidden.flatten(0, -2).split(most), targets.flatten().split(most), strict=True)
    return torch.cat([(x @ weight.T).argmax(-1) == y for x, y in chunks])


def _most_tokens(weight: Tensor, compiled: bool = False) -> int:
    on_gpu = LOGITS_COMPILED if compiled else LOGITS_EAGER
    return max(1, (on_gpu if weight.is_cuda else LOGITS_AT_A_TIME) // len(weight))


def logits_to_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Replace logits [n, V] by softmax - one-hot; return the log-probabilities of targets [n, 1].

    The log-probabilities are in float32 or wider.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = logits.log_softmax(-1, dtype=wide)
    scored = log_p.gather(1, targets)
    if torch.compiler.is_compiling():  # one loop; a scatter would break it up
        columns = torch.arange(logits.shape[1], device=logits.device)
        logits.copy_(log_p.exp() - (columns == targets).to(wide))
    else:
        logits.copy_(log_p.exp_().scatter_(1, targets, scored.expm1()))
    return scored


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_tokens: int,
        learning: bool,
        to_gradient: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> Tensor:
        device = hidden.device.type
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else hidden.dtype
        wide = torch.promote_types(dtype, torch.float32)
        V, x, head, share = len(weight), hidden.to(dtype), weight.to(dtype), 1 / len(targets)
        if to_gradient is not None and V % ALIGNED:
            head = F.pad(head, (0, 0, 0, -V % ALIGNED))  # padding, with logits that stay 0
        # Summing many chunks in half precision would lose a bit or two.
        several = chunk_tokens < len(targets)
        sum_dtype = torch.promote_types(weight.dtype, torch.float32) if several else weight.dtype
        grad_hidden = torch.empty_like(hidden) if learning else None
        grad_weight = torch.empty_like(head, dtype=sum_dtype) if learning else None
        scored = []
        with torch.autocast(device, enabled=False):
            for start in range(0, len(targets), chunk_tokens):
                span = slice(start, start + chunk_tokens)
                y = targets[span].unsqueeze(1)
                # [chunk, V]: d loss / d logits = (softmax - one-hot) / tokens, in the memory of the
                # logits. The products divide by tokens: dividing here would underflow in float16.
                if to_gradient is not None:
                    grad = x[span] @ head.T
                    scored.append(to_gradient(grad[:, :V], y))
                else:
                    grad = (x[span] @ head.T).to(wide).log_softmax(dim=-1)
                    scored.append(grad.gather(1, y).sum())
                if grad_hidden is None or grad_weight is None:
                    continue
                if to_gradient is None:
                    grad.exp_().scatter_add_(1, y, torch.full_like(y, -1, dtype=wide))
                    grad = grad.to(dtype)
                _add_product(grad_hidden[span], False, grad, head, share)
                _add_product(grad_weight, start > 0, grad.T, x[span], share)
        ctx.grads = None if grad_weight is None else (grad_hidden, grad_weight[:V].to(weight.dtype))
        if to_gradient is not None:
            return (-torch.cat(scored)).mean()
        return reduce(torch.sub, scored, hidden.new_zeros((), dtype=wide)) / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy runs backward once; compute the loss again")
        grad_hidden, grad_weight = ctx.grads
        # Without our reference, autograd can keep these buffers instead of copying them.
        ctx.grads = None
        # grad_loss is 1 without accumulation; on a GPU, reading it costs more than multiplying.
        if grad_loss.device.type != "cpu" or grad_loss != 1:
            grad_hidden.mul_(grad_loss)
            grad_weight.mul_(grad_loss)
        return grad_hidden, grad_weight, None, None, None, None


def _add_product(out: Tensor, keep: bool, a: Tensor, b: Tensor, factor: float) -> None:
    """Set out = factor * a @ b, without reading `out`; if `keep`, add the product to it."""
    if out.dtype == a.dtype:
        out.addmm_(a, b, beta=keep, alpha=factor)
    elif a.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=keep, alpha=factor, out=out)
    elif keep:
        out.add_(a @ b, alpha=factor)
    else:
        out.copy_(a @ b).mul_(factor)
