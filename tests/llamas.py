"""Small models from transformers."""

import json
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

Model = TypeVar("Model", bound=PreTrainedModel)


def theirs(sizes: tuple, of: type[LlamaConfig | Qwen2Config] = LlamaConfig) -> PreTrainedModel:
    """A model with random weights and gains; `sizes` are in the order of the next line."""
    layers, heads, kv_heads, head_dim, context, vocabulary, inner, base, eps, tied = sizes
    torch.manual_seed(7)
    config = of(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=heads * head_dim,
        max_position_embeddings=context,
        vocab_size=vocabulary,
        intermediate_size=inner,
        rope_theta=base,
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
    )
    return shake(AutoModelForCausalLM.from_config(config).eval())


@torch.no_grad()
def shake(model: Model) -> Model:
    """Return the model with noise on its parameters, so that gains and biases show."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@torch.no_grad()
def assert_same_logits(ours: nn.Module, model: PreTrainedModel) -> None:
    config = model.config
    ids = torch.randint(config.vocab_size, (2, config.max_position_embeddings))
    expected, found = model(ids).logits, ours(ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(getattr(found, "logits", found), expected, rtol=0, atol=1e-5)


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
