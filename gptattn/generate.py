"""Text from a model, token by token, through the cache."""

import torch
from torch import Tensor

from gptattn.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    ids: Tensor,
    max_new_tokens: int,
    *,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompt ids [B, T] with `max_new_tokens` sampled ones behind it, [B, T + new].

    `vocab_size` keeps ids below it, for a model padded beyond its tokenizer. When the context is
    full its newer half is read anew and generation goes on.
    """
    training = model.training
    model.eval()
    try:
        cache = model.new_cache(len(ids))
        unread = ids[:, -model.context_length :]
        for _ in range(max_new_tokens):
            if cache.length + unread.shape[1] > model.context_length:
                cache = model.new_cache(len(ids))
                unread = ids[:, -max(1, model.context_length // 2) :]
            # Compiled blocks would be compiled anew for every length of the cache.
            with torch.compiler.set_stance("force_eager"):
                logits = model(unread, cache)[:, -1, :vocab_size].float() / temperature
            if top_k is not None:
                kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kept, float("-inf"))
            probabilities = logits.softmax(dim=-1)
            unread = torch.multinomial(probabilities, 1, generator=generator)
            ids = torch.cat([ids, unread], dim=1)
        return ids
    finally:
        model.train(training)
