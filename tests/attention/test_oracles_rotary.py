"""Rotary positions, windows, QK-norm and gates against transformers' own attention classes."""

import pytest
import torch
from hugging import (
    BACKENDS,
    SIZES,
    D,
    E,
    H,
    Pair,
    T,
    assert_agreement,
    calling,
    ours,
    projections,
    rope,
    widen,
)
from transformers import LlamaConfig, MistralConfig, Qwen3NextConfig
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3_next import modeling_qwen3_next

from gptattn.attention.parts.gate import Gate
from gptattn.attention.parts.qk_norm import QKNorm
from gptattn.position import RotaryPosition


@BACKENDS
@pytest.mark.parametrize("window", [1, 4, T])
def test_rope_with_a_window_of_w_tokens_is_mistrals_sliding_window_of_w(
    window, backend, monkeypatch
):
    widen(monkeypatch, modeling_mistral)
    config = MistralConfig(**SIZES, rope_parameters=rope(500.0), sliding_window=window)
    theirs = modeling_mistral.MistralAttention(config, layer_idx=0).double()
    turning = modeling_mistral.MistralRotaryEmbedding(config)
    mine = ours(RotaryPosition(T, D, base=500.0), window=window, backend=backend)
    call = calling(theirs, turning, config, window=True)
    assert_agreement(mine, call, projections(mine, theirs))


def test_an_elementwise_gate_with_qk_norm_and_partial_rope_is_qwen3_nexts(monkeypatch):
    widen(monkeypatch, modeling_qwen3_next)
    turned = rope(partial_rotary_factor=0.4)
    config = Qwen3NextConfig(**SIZES, rope_parameters=turned, num_hidden_layers=4, rms_norm_eps=0.1)
    theirs = modeling_qwen3_next.Qwen3NextAttention(config, layer_idx=3).double()
    turning = modeling_qwen3_next.Qwen3NextRotaryEmbedding(config)
    mine = ours(RotaryPosition(T, D, fraction=0.4))
    norm, gate = QKNorm(D, eps=0.1).double(), Gate(E, H, D, "elementwise").double()
    mine.add_part("qk_norm", norm)
    mine.add_part("gate", gate)
    # Their query layer holds, head by head, D rows of queries and D rows of gates.
    plain = [pair for pair in projections(mine, theirs) if pair.mine is not mine.W_query.weight]
    joint = [
        Pair(mine.W_query.weight, theirs.q_proj.weight, lambda w: w.view(H, 2, D, E)[:, 0]),
        Pair(gate.W_gate.weight, theirs.q_proj.weight, lambda w: w.view(H, 2, D, E)[:, 1]),
    ]
    gains = [
        Pair(norm.q_gain_D, theirs.q_norm.weight, less=1.0),
        Pair(norm.k_gain_D, theirs.k_norm.weight, less=1.0),
    ]
    call = calling(theirs, turning, config)
    assert_agreement(mine, call, [*plain, *joint, *gains])


@pytest.mark.parametrize(
    ("stretch", "original", "base"), [(2.0, 64, 10_000.0), (4.0, 16, 100.0), (11.0, 4096, 500.0)]
)
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_a_stretched_context_turns_as_transformers_yarn_does(
    stretch, original, base, fraction, monkeypatch
):
    widen(monkeypatch, modeling_llama)
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
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(length)[None])
    turned = int(fraction * size)
    assert cos.shape[-1] == turned
    expected, _ = modeling_llama.apply_rotary_pos_emb(q[..., :turned], q[..., :turned], cos, sin)
    position = RotaryPosition(length, size, base, fraction, stretch, original)
    got, _ = position.rotate(q, q, range(length))
    torch.testing.assert_close(got[..., :turned], expected, rtol=0, atol=1e-11)
    assert torch.equal(got[..., turned:], q[..., turned:])
