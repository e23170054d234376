"""Tokens from a model, one by one, through the cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gptattn.attention.cache import CacheGroup
from gptattn.decode.sampling import Sampling
from gptattn.model.gpt import GPT


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return prompts [T_b] of different lengths as ids [B, T], and each row's padding length [B].

    A row is padded with its own first id, so that the repetition penalty applies to no other id.
    """
    longest = max(len(ids) for ids in prompts)
    padding = [longest - len(ids) for ids in prompts]
    rows = [torch.cat([ids[:1].expand(n), ids]) for ids, n in zip(prompts, padding, strict=True)]
    return torch.stack(rows), torch.tensor(padding, device=prompts[0].device)


@torch.inference_mode()
def stream(
    model: GPT,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    padding: Tensor | None = None,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
    slide: bool = True,
) -> Iterator[Tensor]:
    """Yield the next ids [B, 1] after the prompts `ids` [B, T], up to `max_new_tokens` times.

    The first `padding[b]` ids of row b are padding: see `pad_left`. Only ids below `vocab_size`
    are sampled, for a model padded beyond its tokenizer. When the context is full, its newer half
    is read again into a new cache and generation continues, or ends without `slide`. If a prompt is
    longer than the context, only its end is read.
    """
    training = model.training
    model.eval()
    model.prepare(len(ids))
    try:
        most = min(model.context_length, ids.shape[1] + max_new_tokens)
        cache, unread = _start_cache(model, ids, model.context_length, most, padding)
        for _ in range(max_new_tokens):
            if cache.length + unread.shape[1] > model.context_length:
                if not slide:
                    return
                cache, unread = _start_cache(
                    model, ids, max(1, model.context_length // 2), most, padding
                )
            # Compiled blocks would be recompiled for every length of the cache.
            with torch.compiler.set_stance("force_eager"):
                logits = model.next_logits(unread, cache)[:, :vocab_size]
            unread = sampling.draw(logits, ids, generator)
            ids = torch.cat([ids, unread], dim=1)
            yield unread
    finally:
        model.prepare(None)
        model.train(training)


def _start_cache(
    model: GPT, ids: Tensor, tokens: int, capacity: int, padding: Tensor | None
) -> tuple[CacheGroup, Tensor]:
    """Return an empty cache, and the newest `tokens` ids, still to be read into it."""
    unread = ids[:, -tokens:]
    if padding is not None:
        padding = (padding - (ids.shape[1] - unread.shape[1])).clamp_min(0)
        padding = padding if padding.any() else None
    return model.new_cache(len(ids), capacity, padding), unread


def generate(
    model: GPT,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    padding: Tensor | None = None,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the prompt ids [B, T] followed by `max_new_tokens` new ones, [B, T + new]."""
    new = stream(
        model,
        ids,
        max_new_tokens,
        sampling,
        padding=padding,
        vocab_size=vocab_size,
        generator=generator,
    )
    return torch.cat([ids, *new], dim=1)
