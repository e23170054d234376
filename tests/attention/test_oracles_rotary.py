"""Rotary positions of a stretched context against transformers' own."""

import pytest
import torch
from hugging import SIZES, H, keep_float64, rope
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from gptattn.position import RotaryPosition


@pytest.mark.parametrize(
    ("stretch", "original", "base"), [(2.0, 64, 10_000.0), (4.0, 16, 100.0), (11.0, 4096, 500.0)]
)
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_a_stretched_context_turns_as_transformers_yarn_does(stretch, original, base, fraction):
    yarn = {
        "rope_type": "yarn",
        "factor": stretch,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": fraction,
    }
    size = 80  # of heads: the ramp from 32 turns to 1 covers many pairs
    sizes = SIZES | {"head_dim": size, "hidden_size": H * size, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, rope_parameters=rope(base, **yarn))
    length = 97
    q = torch.randn(1, H, length, size, dtype=torch.float64)
    with keep_float64():
        cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(length)[None])
    turned = int(fraction * size)
    assert cos.shape[-1] == turned
    expected, _ = modeling_llama.apply_rotary_pos_emb(q[..., :turned], q[..., :turned], cos, sin)
    position = RotaryPosition(length, size, base, fraction, stretch, original)
    got, _ = position.rotate(q, q, range(length))
    torch.testing.assert_close(got[..., :turned], expected, rtol=0, atol=1e-11)
    assert torch.equal(got[..., turned:], q[..., turned:])
