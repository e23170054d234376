"""Differential attention against transformers' DiffLlama, its sizes, and mistakes in them."""

import math

import pytest
import torch
from building import build_gpt
from contract import draw
from hugging import BACKENDS, SIZES, D, E, H, Pair, T, assert_agreement, calling, rope, widen
from transformers import DiffLlamaConfig
from transformers.models.diffllama import modeling_diffllama

from gptattn.attention.variants.differential import EPS, DifferentialAttention
from gptattn.errors import ConfigError
from gptattn.position import RotaryPosition


def ours(layer: int = 0, kv_heads: int | None = None, **settings) -> DifferentialAttention:
    settings = {"out_bias": False, "backend": "reference"} | settings
    heads = {"num_kv_heads": kv_heads, "layer": layer}
    return DifferentialAttention(E, E, T, H, **heads, **settings).double()


@BACKENDS
def test_differential_attention_of_grouped_heads_is_diffllamas(backend, monkeypatch):
    widen(monkeypatch, modeling_diffllama)
    layer, kv_heads = 3, 2
    sizes = SIZES | {"num_key_value_heads": kv_heads, "rms_norm_eps": EPS}
    config = DiffLlamaConfig(**sizes, rope_parameters=rope())
    theirs = modeling_diffllama.DiffLlamaAttention(config, layer_idx=layer).double()
    # Theirs has no gain: it gets one, as the authors' own code has it.
    theirs.groupnorm = torch.nn.RMSNorm(2 * D, eps=EPS).double()
    turning = modeling_diffllama.DiffLlamaRotaryEmbedding(config)
    mine = ours(layer, kv_heads, position=RotaryPosition(T, D), backend=backend)
    pairs = [
        Pair(mine.W_query.weight, theirs.q_proj.weight),
        Pair(mine.W_key.weight, theirs.k_proj.weight),
        # The halves of a value are neighbours here, and kv_heads / 2 heads apart there.
        Pair(
            mine.W_value.weight,
            theirs.v_proj.weight,
            lambda w: w.view(2, kv_heads // 2, D, E).transpose(0, 1),
        ),
        Pair(mine.out_proj.weight, theirs.o_proj.weight),
        Pair(mine.norm_gain, theirs.groupnorm.weight),
    ]
    pairs += [
        Pair(mine.get_parameter(f"lambda_{name}_D"), theirs.get_parameter(f"lambda_{name}"))
        for name in ("q1", "k1", "q2", "k2")
    ]
    call = calling(theirs, turning, config)
    assert_agreement(mine, call, pairs)


def test_weights_are_drawn_as_in_the_paper():
    model = build_gpt("attn=differential", "model.d_model=600", "model.num_layers=2")
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        assert isinstance(attention, DifferentialAttention)
        drawn = torch.cat([attention.lambda_q1_D, attention.lambda_k1_D, attention.lambda_q2_D])
        assert drawn.std().item() == pytest.approx(0.1, rel=0.15)
        assert torch.equal(attention.norm_gain, torch.ones(200))
        assert attention.lambda0 == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * layer))


def test_parameters_and_cache_are_multi_head_attentions_but_for_lambda_and_the_norm():
    attention = DifferentialAttention(768, 768, 1024, 12)
    assert sum(p.numel() for p in attention.parameters()) == 2_360_064 + 4 * 64 + 2 * 64
    assert attention.half().new_cache(1, 1).nbytes == 3072
    grouped = DifferentialAttention(768, 768, 1024, 12, num_kv_heads=4)
    assert grouped.half().new_cache(1, 1).nbytes == 1024


def test_dropout_drops_each_of_the_two_softmaxes():
    attention = ours(out_proj=False, dropout=0.5).train()
    x = draw(61, 1, E)
    y = attention(x).unflatten(-1, (H // 2, 2 * D))
    v = attention.W_value(x).unflatten(-1, (H // 2, 2 * D))
    # One token: each softmax is 2 or 0, and the norm leaves of their difference only the sign.
    signs = (y * v).sum(-1).sign().unique().tolist()
    assert signs == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.num_heads=3"], r"num_heads=3 must be even for differential .*\[2, 6, 10, 30\]"),
        (["attn.num_kv_heads=3"], r"num_kv_heads=3 must be even .*\[2, 6\]"),
        (["attn.num_kv_heads=4"], "num_kv_heads=4 must divide num_heads=6"),
    ],
)
def test_heads_that_form_no_pairs_are_refused_in_one_line(overrides, said):
    with pytest.raises(ConfigError, match=said) as caught:
        build_gpt("attn=differential", *overrides)
    assert caught.value.field == overrides[0].partition("=")[0]
