"""The loss of held-out tokens: of each token, by position in the context, and through a cache."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.data.sampler import DocumentNumbers, ValidationSet
from gptattn.data.tokenizer import Ids
from gptattn.evaluate.caches import CacheKind, build_caches
from gptattn.model.gpt import GPT
from gptattn.model.loss import LOGITS_AT_A_TIME
from gptattn.runs.evaluation import Bin, CacheLoss, LengthLoss

TOKENS_AT_A_TIME = 2**15  # in one pass through the model
CACHE_BYTES = 2**29  # for all rows decoded together


def compare_tokens(model: GPT, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's cross-entropy in nats, in float64, and whether its logit is the largest.

    `hidden` [..., d_model] is what `GPT.hidden` returns for targets [...]. Logits are computed in
    chunks, and the softmax in float32 or wider.
    """
    weight = model.head.weight
    chunk = max(1, LOGITS_AT_A_TIME // len(weight))
    losses, largest = [], []
    pairs = zip(hidden.flatten(0, -2).split(chunk), targets.flatten().split(chunk), strict=True)
    for x, y in pairs:
        logits = F.linear(x, weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses.append(F.cross_entropy(logits.to(wide), y, reduction="none").double())
        largest.append(logits.argmax(dim=-1) == y)
    return torch.cat(losses).view(targets.shape), torch.cat(largest).view(targets.shape)


@torch.no_grad()
def measure_by_position(
    model: GPT,
    tokens: Ids,
    length: int,
    trained: int,
    documents: DocumentNumbers | None = None,
) -> LengthLoss:
    """Return the loss of held-out tokens in windows of `length`, at most the model's context.

    Whole windows follow one another from the text's beginning, so that each position is scored
    equally often; up to length - 1 tokens at the end are left out. `trained`, the context of
    training, is an edge of the bins. `documents` numbers the documents to keep apart.
    """
    windows = (len(tokens) - 1) // length  # the first token is only context
    device = model.head.weight.device
    total_T = torch.zeros(length, dtype=torch.float64, device=device)
    rows = max(1, TOKENS_AT_A_TIME // length)
    whole = tokens[: windows * length + 1]
    for batch in ValidationSet(whole, rows, length, documents):
        ids, targets, *apart = (tensor.to(device) for tensor in batch)
        hidden = model.hidden(ids, None, apart[0] if apart else None)
        total_T += compare_tokens(model, hidden, targets)[0].sum(0)
    mean_T = total_T / windows
    bins = [
        Bin(below + 1, edge, mean_T[below:edge].mean().item())
        for below, edge in pairwise([0, *list_edges(length, trained)])
    ]
    return LengthLoss(windows, mean_T.mean().item(), bins)


def list_edges(length: int, trained: int) -> list[int]:
    """Return each bin's longest context: 1, 2, 3, 4, 6, 8, 12, 16, ..., two for each doubling.

    They include the trained length and `length`, where the last bin ends.
    """
    powers = [2**i for i in range(math.ceil(math.log2(length)) + 1)]
    found = {*powers, *(3 * power // 2 for power in powers[1:]), trained, length}
    return sorted(edge for edge in found if edge <= length)


@torch.no_grad()
def measure_by_cache(model: GPT, tokens: Ids, kind: CacheKind) -> CacheLoss:
    """Return the loss of all held-out tokens, in the same windows as a validation.

    Each window begins with an empty cache. If the cache drops tokens, the window is decoded token
    by token. If it keeps all, each token's entries are packed separately and all later tokens read
    the packed ones, so a whole window in one step gives the same numbers.
    """
    T, device = model.context_length, model.head.weight.device
    nbytes = build_caches(model, kind, 1, T).nbytes  # of one row
    rows = max(1, min(TOKENS_AT_A_TIME // T, CACHE_BYTES // max(1, nbytes)))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids, targets in ValidationSet(tokens, rows, T):
        ids, targets = ids.to(device), targets.to(device)
        length = ids.shape[1]
        caches = build_caches(model, kind, len(ids), length)
        step = length if kind.window is None else 1
        hidden = [model.hidden(some, caches) for some in ids.split(step, dim=1)]
        total += compare_tokens(model, torch.cat(hidden, dim=1), targets)[0].sum()
    return CacheLoss(total.item() / (len(tokens) - 1), nbytes)
