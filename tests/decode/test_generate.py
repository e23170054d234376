"""Sampling through the cache, against the same rule written out without a cache."""

import pytest
import torch
from building import build_gpt
from torch import Tensor

from gptattn.decode.generate import pad_left, stream
from gptattn.decode.sampling import Sampling
from gptattn.model.gpt import GPT

CONTEXT, V = 7, 61
GREEDY = Sampling(temperature=0)


# The contract tests decode with every mechanism and position; these are the kinds of caches.
KINDS = [
    ("mha", "learned"),
    ("mla", "rope"),
    ("sliding", "alibi"),
    ("cross_layer", "sinusoidal"),
    ("gated_deltanet", "none"),
]
EACH = pytest.mark.parametrize(("variant", "position"), KINDS)


def generate(model: GPT, ids: Tensor, tokens: int, sampling: Sampling, **options) -> Tensor:
    """The prompts with the ids that `stream` yields after them."""
    return torch.cat([ids, *stream(model, ids, tokens, sampling, **options)], dim=1)


def model_of(variant: str = "mha", position: str = "learned", **more: str) -> GPT:
    extra = [f"model.{name}={value}" for name, value in more.items()]
    model = build_gpt(
        f"attn={variant}",
        f"position={position}",
        "model.d_model=36",
        f"model.context_length={CONTEXT}",
        *extra,
        vocab_size=V,
        std=0.4,
    ).double()
    # Small embeddings and no favourite token, or it would repeat the prompt's last one for ever.
    with torch.no_grad():
        model.token_embedding.weight.mul_(0.1)
        model.norm.bias.zero_()
    return model


@torch.no_grad()
def greedy_without_cache(model: GPT, ids: Tensor, tokens: int) -> Tensor:
    """Read what fits; once the context is full, continue from its newer half."""
    start = max(0, ids.shape[1] - CONTEXT)
    for _ in range(tokens):
        if ids.shape[1] - start > CONTEXT:
            start = ids.shape[1] - CONTEXT // 2
        best = model(ids[:, start:])[:, -1].argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, best], dim=1)
    return ids


@EACH
def test_greedy_text_is_the_argmax_of_the_model_without_cache(variant, position):
    model = model_of(variant, position).eval()
    for prompt_tokens in (2, 2 * CONTEXT):
        prompt = torch.randint(V, (3, prompt_tokens))
        # Enough tokens to fill the context twice.
        text = generate(model, prompt, 12, Sampling(top_k=1))
        assert torch.equal(text, greedy_without_cache(model, prompt, 12))
        assert len(text[:, prompt_tokens:].unique()) > 1


@EACH
def test_prompts_of_different_lengths_go_on_as_each_would_alone(variant, position):
    model = model_of(variant, position)
    prompts = [torch.randint(V, (tokens,)) for tokens in (2, 5, 1)]
    ids, padding = pad_left(prompts)
    together = generate(model, ids, 3, GREEDY, padding=padding)  # the longest fills the context
    for row, pad, prompt in zip(together, padding, prompts, strict=True):
        assert torch.equal(row[pad:], generate(model, prompt[None], 3, GREEDY)[0])
    # Then all rows slide with the longest, until no padding is left.
    text = generate(model, ids, 12, GREEDY, padding=padding)
    assert torch.equal(text[1], generate(model, prompts[1][None], 12, GREEDY)[0])
    more = generate(model, text, 1, GREEDY, padding=padding)
    assert torch.equal(more[:, -1:], generate(model, text[:, -CONTEXT:], 1, GREEDY)[:, -1:])


def test_the_same_generator_seed_gives_the_same_text_whatever_was_drawn():
    model, prompt = model_of(), torch.randint(V, (3, 2))
    texts = []
    for seed in (5, 5, 6):
        torch.rand(seed)
        generator = torch.Generator().manual_seed(seed)
        texts.append(generate(model, prompt, 20, Sampling(), generator=generator))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert torch.equal(texts[0][:, :2], prompt)
    assert texts[0].shape == (3, 22)
    assert not texts[0].requires_grad


def test_ids_stay_below_the_vocabulary_of_the_tokenizer():
    model, prompt = model_of(), torch.zeros(5, 1, dtype=torch.int64)
    assert generate(model, prompt, 20, Sampling()).max() >= 5
    for sampling in (Sampling(), Sampling(top_k=9)):
        assert generate(model, prompt, 20, sampling, vocab_size=5).max() < 5


@pytest.mark.parametrize("training", [True, False])
def test_generation_samples_without_dropout_and_restores_the_mode(training):
    model = model_of(dropout="0.5").train(training)
    prompt = torch.randint(V, (3, 2))
    first = generate(model, prompt, 9, Sampling(top_k=1))
    assert torch.equal(first, generate(model, prompt, 9, Sampling(top_k=1)))
    assert all(module.training is training for module in model.modules())
    with pytest.raises(IndexError):
        generate(model, prompt + V, 9, Sampling())
    assert model.training is training
