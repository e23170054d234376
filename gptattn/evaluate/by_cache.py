"""The loss of a held-out text that is decoded through a cache."""

import torch

from gptattn.data.sampler import ValidationSet
from gptattn.data.tokens import Tokens
from gptattn.evaluate.cache_kinds import CacheKind, new_caches
from gptattn.evaluate.token_losses import TOKENS_AT_A_TIME, scored, token_losses
from gptattn.model.gpt import GPT
from gptattn.runs.evaluation import CacheLoss

CACHE_BYTES = 2**29  # of the rows that are decoded side by side


@torch.no_grad()
def by_cache(model: GPT, tokens: Tokens, kind: CacheKind) -> CacheLoss:
    """Return the loss of all held-out tokens, in windows of the context as a validation has them.

    Each window begins with an empty cache. Where the cache drops tokens, it is decoded one token at
    a time. Where it keeps all, each token's entries are packed on their own and all later tokens
    read the packed ones, so that a whole window in one step gives the same numbers.
    """
    T, device = model.context_length, model.head.weight.device
    nbytes = _bytes_of_one_row(model, kind)
    rows = max(1, min(TOKENS_AT_A_TIME // T, CACHE_BYTES // max(1, nbytes)))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids, targets in ValidationSet(tokens, rows, T):
        ids, targets = ids.to(device), targets.to(device)
        length = ids.shape[1]
        caches = new_caches(model, kind, len(ids), length)
        step = length if kind.window is None else 1
        hidden = [model.hidden(some, caches) for some in ids.split(step, dim=1)]
        total += token_losses(model, torch.cat(hidden, dim=1), targets).sum()
    return CacheLoss(total.item() / scored(tokens), nbytes)


def _bytes_of_one_row(model: GPT, kind: CacheKind) -> int:
    return new_caches(model, kind, 1, model.context_length).nbytes
