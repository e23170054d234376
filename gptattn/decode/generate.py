"""Generates tokens from a model one by one, through the cache."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gptattn.data.tokenizer import Ids, Tokenizer
from gptattn.decode.sampling import Sampling
from gptattn.model.gpt import GPT


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return prompts [T_b] of different lengths as ids [B, T], and the padding of each row [B]."""
    ids = pad_sequence(list(prompts), batch_first=True, padding_side="left")
    lengths = torch.tensor([len(own) for own in prompts], device=ids.device)
    return ids, ids.shape[1] - lengths


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
) -> Iterator[Tensor]:
    """Yield the next ids [B, 1] after the prompts `ids` [B, T], up to `max_new_tokens` times.

    The first `padding[b]` ids of row b are padding: see `pad_left`. Only ids below `vocab_size`
    are sampled, for a model padded beyond its tokenizer. When the context is full, its newer half
    is read into a new cache. If a prompt is longer than the context, only its end is read.
    """
    training = model.training
    model.eval()
    model.prepare(len(ids))
    try:
        most = min(model.context_length, ids.shape[1] + max_new_tokens)
        cache, unread = None, ids[:, -model.context_length :]
        for _ in range(max_new_tokens):
            if cache is not None and cache.length + unread.shape[1] > model.context_length:
                cache, unread = None, ids[:, -max(1, model.context_length // 2) :]
            if cache is None:
                left = None  # padding of the ids to read
                if padding is not None:
                    left = (padding - (ids.shape[1] - unread.shape[1])).clamp_min(0)
                    left = left if left.any() else None
                cache = model.new_cache(len(ids), most, left)
            # Compiled blocks would be recompiled for every length of the cache.
            with torch.compiler.set_stance("force_eager"):
                logits = model.next_logits(unread, cache)[:, :vocab_size]
            unread = sampling.draw(logits, generator)
            ids = torch.cat([ids, unread], dim=1)
            yield unread
    finally:
        model.prepare(None)
        model.train(training)


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: Ids,
    tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
) -> str:
    """Return the text of the prompt and of `tokens` new ids, or fewer once `stop()` is True."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(prompt.astype("int64"))[None].to(device)
    draws = torch.Generator(device).manual_seed(seed)
    size = tokenizer.vocab_size
    new = stream(model, ids, tokens, sampling, vocab_size=size, generator=draws)
    found = torch.cat([ids, *takewhile(lambda _: not stop(), new)], dim=1)
    return tokenizer.decode(found[0].cpu().numpy())
