"""Loss by position in the context."""

import math
from itertools import pairwise

import numpy as np
import torch

from gptattn.data.sampler import DocumentNumbers
from gptattn.data.tokens import Tokens
from gptattn.evaluate.token_losses import TOKENS_AT_A_TIME, scored, token_losses
from gptattn.model.gpt import GPT
from gptattn.runs.evaluation import Bin, LengthLoss


@torch.no_grad()
def by_position(
    model: GPT,
    tokens: Tokens,
    length: int,
    trained: int,
    documents: DocumentNumbers | None = None,
) -> LengthLoss:
    """Return the loss of held-out tokens in windows of `length`, at most the model's context.

    The windows lie side by side from the text's beginning, as many as fit whole, so that each
    position is scored equally often: up to length - 1 tokens at the end are left out. `trained`,
    the context that the weights know, is an edge of the bins. With `documents`, which numbers those
    of the tokens, they are kept apart.
    """
    windows = scored(tokens) // length
    device = model.head.weight.device
    total_T = torch.zeros(length, dtype=torch.float64, device=device)
    rows = max(1, TOKENS_AT_A_TIME // length)
    for first in range(0, windows, rows):
        count = min(rows, windows - first)
        span = tokens[first * length : (first + count) * length + 1].astype(np.int64)
        ids = torch.from_numpy(span).to(device)
        apart = None
        if documents is not None:
            numbers = documents(first * length, (first + count) * length)
            apart = torch.from_numpy(numbers).view(count, length).to(device)
        hidden = model.hidden(ids[:-1].view(count, length), None, apart)
        total_T += token_losses(model, hidden, ids[1:].view(count, length)).sum(0)
    mean_T = total_T / windows
    bins = [
        Bin(below + 1, edge, mean_T[below:edge].mean().item())
        for below, edge in pairwise([0, *edges(length, trained)])
    ]
    return LengthLoss(windows, mean_T.mean().item(), bins)


def edges(length: int, trained: int) -> list[int]:
    """Return the last context of each bin: 1, 2, 3, 4, 6, 8, 12, 16, ..., two for each doubling.

    The trained length and `length` itself, where the last bin ends, are among them.
    """
    powers = [2**i for i in range(math.ceil(math.log2(length)) + 1)]
    found = {*powers, *(3 * power // 2 for power in powers[1:]), trained, length}
    return sorted(edge for edge in found if edge <= length)
