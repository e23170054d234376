"""Text from a model, token by token, through the cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gptattn.gpt import GPT
from gptattn.sampling import Sampling


@torch.inference_mode()
def stream(
    model: GPT,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
    slide: bool = True,
) -> Iterator[Tensor]:
    """Yield the next ids [B, 1] of the prompts ids [B, T], up to `max_new_tokens` times.

    `vocab_size` keeps ids below it, for a model padded beyond its tokenizer. When the context is
    full its newer half is read anew and generation goes on, or, without `slide`, it ends. Of a
    prompt longer than the context the newest part is read.
    """
    training = model.training
    model.eval()
    try:
        cache = model.new_cache(len(ids))
        unread = ids[:, -model.context_length :]
        for _ in range(max_new_tokens):
            if cache.length + unread.shape[1] > model.context_length:
                if not slide:
                    return
                cache = model.new_cache(len(ids))
                unread = ids[:, -max(1, model.context_length // 2) :]
            # Compiled blocks would be compiled anew for every length of the cache.
            with torch.compiler.set_stance("force_eager"):
                logits = model.next_logits(unread, cache)[:, :vocab_size]
            unread = sampling.next(logits, ids, generator)
            ids = torch.cat([ids, unread], dim=1)
            yield unread
    finally:
        model.train(training)


def generate(
    model: GPT,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompt ids [B, T] with `max_new_tokens` new ones behind it, [B, T + new]."""
    new = stream(model, ids, max_new_tokens, sampling, vocab_size=vocab_size, generator=generator)
    return torch.cat([ids, *new], dim=1)
