"""Latent attention against transformers' DeepseekV3, by hand, and in both of its forms."""

from typing import Any

import pytest
import torch
from building import build_gpt
from hugging import BACKENDS, SIZES, D, E, H, Pair, T, assert_agreement, calling, rope, widen
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from gptattn.attention.variants.mla import MultiHeadLatentAttention
from gptattn.errors import ConfigError
from gptattn.model.cost import count_parameters
from gptattn.position import HeadPosition, RotaryPosition
from gptattn.settings.build import build_model
from gptattn.settings.compose import settings

C, P, QUERY = 23, 6, 17  # ranks of the latents, and the numbers that rotate


def ours(position: HeadPosition | None = None, **changes: Any) -> MultiHeadLatentAttention:
    """A layer at the sizes of the oracles, in float64."""
    own = {"kv_rank": C, "query_rank": QUERY, "out_bias": False} | changes
    return MultiHeadLatentAttention(E, E, T, H, position=position, **own).double()


def pairs_with(mine: MultiHeadLatentAttention, theirs: Any) -> list[Pair]:
    """Their keys and values come from one layer, head by head D rows of each."""
    up = theirs.kv_b_proj.weight
    pairs = [
        Pair(mine.W_latent.weight, theirs.kv_a_proj_with_mqa.weight),
        Pair(mine.latent_norm.weight, theirs.kv_a_layernorm.weight),
        Pair(mine.W_key.weight, up, lambda w: w.view(H, 2, D, C)[:, 0]),
        Pair(mine.W_value.weight, up, lambda w: w.view(H, 2, D, C)[:, 1]),
        Pair(mine.out_proj.weight, theirs.o_proj.weight),
    ]
    if mine.query_rank is None:
        return [*pairs, Pair(mine.W_query.weight, theirs.q_proj.weight)]
    return [
        *pairs,
        Pair(mine.W_query_down.weight, theirs.q_a_proj.weight),
        Pair(mine.query_norm.weight, theirs.q_a_layernorm.weight),
        Pair(mine.W_query.weight, theirs.q_b_proj.weight),
    ]


@BACKENDS
@pytest.mark.parametrize("query_rank", [None, QUERY])
def test_latent_attention_is_deepseeks(query_rank, backend, monkeypatch):
    widen(monkeypatch, modeling_deepseek_v3)
    heads = {"qk_nope_head_dim": D, "qk_rope_head_dim": P, "v_head_dim": D}
    ranks = {"kv_lora_rank": C, "q_lora_rank": query_rank, "num_key_value_heads": H}
    config = DeepseekV3Config(
        **(SIZES | heads | ranks | {"head_dim": P}), rope_parameters=rope(), rope_interleave=False
    )
    theirs = modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0).double()
    turning = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    mine = ours(RotaryPosition(T, D), rope_dim=P, query_rank=query_rank, backend=backend)
    call = calling(theirs, turning, config)
    assert_agreement(mine, call, pairs_with(mine, theirs))


def test_the_form_with_fewer_multiplications_is_taken_and_training_makes_keys():
    mine = ours()
    mine.head_dim, mine.kv_rank = 64, 256
    # Per head: t C D + t s C over the latents, s C D + t s D with keys: level near t = 85.
    assert mine.absorbs(80, 8192)
    assert not mine.absorbs(90, 8192)
    assert not mine.absorbs(1, 1)
    mine.kv_rank = 8  # narrower than a head
    assert not mine.absorbs(11, 11)


def of_gpt2_small(*overrides: str) -> Any:
    with torch.device("meta"):
        own = ["model=gpt2_small", "trainer=cpu", "attn=mla", *overrides]
        return build_model(settings(own), vocab_size=256)


def test_at_gpt2_small_it_has_the_papers_sizes_in_parameters_and_cache():
    model = of_gpt2_small("position=rope")
    layer = model.layers()[0].attention
    assert (layer.kv_rank, layer.query_rank, layer.rope_dim) == (256, 512, 32)
    assert count_parameters(layer) == 2_187_264 + (256 + 512) + 768
    assert model.bfloat16().new_cache(batch=1).nbytes == 12 * 1024 * 576
    # Without rotary positions the 32 columns of keys, and of each query, are not there.
    learned = of_gpt2_small().layers()[0].attention
    assert count_parameters(layer) - count_parameters(learned) == 32 * 768 + 512 * 12 * 32
    assert learned.bfloat16().new_cache(1, 1).nbytes == 512
    # Training: 96 numbers of a pair for the score, 64 for the sum. Decoding: a whole entry each.
    assert layer.flops(100, 100) == 2 * 12 * (96 + 64) * 100 * 101 // 2
    assert layer.flops(1, 100) == 2 * 12 * (288 + 288) * 100
    projections = [layer.W_query_down, layer.W_query, layer.W_latent]
    projections += [layer.W_key, layer.W_value, layer.out_proj]
    assert sum(p.weight.numel() for p in projections) == 2_187_264


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("attn.kv_rank=0", "attn.kv_rank: kv_rank=0 does not fit; give 1 to 30"),
        ("attn.kv_rank=31", "attn.kv_rank: kv_rank=31 does not fit; give 1 to 30"),
        ("attn.query_rank=31", "attn.query_rank: query_rank=31 does not fit"),
        ("attn.rope_dim=3", "attn.rope_dim: rope_dim=3 must be even"),
        ("attn.scale=0", "attn.scale: scale=0 must be a positive number; null: the mecha"),
        ("part=qk_norm", "part: attn=mla keeps no keys and values of each head that a part could"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(wrong, message):
    sizes = ["model.num_heads=3", "position=rope"]  # heads of 10
    with pytest.raises(ConfigError) as error:
        build_gpt("attn=mla", *sizes, *wrong.split())
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_part_that_changes_heads_goes_to_the_layers_that_keep_them():
    parts = "part=[qk_norm,gate]"
    model = build_gpt("pattern=[mla,gqa]", parts, "position=none")
    taken = [{*block.attention.get_submodule("parts")._modules} for block in model.layers()]
    assert taken == [{"gate"}, {"qk_norm", "gate"}]
    said = r"^part: the pattern keeps no keys .* so it cannot take qk_norm; leave that out"
    with pytest.raises(ConfigError, match=said):
        build_gpt("pattern=[mla,gated_deltanet]", parts, "position=none")
