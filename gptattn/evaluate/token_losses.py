"""The loss of each token, without ever holding all logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.data.tokens import Tokens
from gptattn.model.gpt import GPT
from gptattn.model.loss import LOGITS_AT_A_TIME

TOKENS_AT_A_TIME = 2**15  # in one pass through the model


def token_losses(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats of each target: [B, T] in float64.

    `hidden` [B, T, d_model] is what `GPT.hidden` returns; the softmax is in float32 or wider.
    """
    weight = model.head.weight
    chunk = max(1, LOGITS_AT_A_TIME // len(weight))
    done = []
    for x, y in zip(hidden.flatten(0, 1).split(chunk), targets.flatten().split(chunk), strict=True):
        logits = F.linear(x, weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        done.append(F.cross_entropy(logits.to(wide), y, reduction="none").double())
    return torch.cat(done).view(targets.shape)


def scored(tokens: Tokens) -> int:
    """Return how many held-out tokens are scored: all but the first, which is only context."""
    return len(tokens) - 1
