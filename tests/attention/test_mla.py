"""Latent attention by hand, and in both of its forms; test_recipes.py has it as released."""

from typing import Any

import torch
from building import build_gpt, settings
from support import refuses

from gptattn.attention.variants.mla import MultiHeadLatentAttention
from gptattn.build.model import build_model
from gptattn.model.cost import count_parameters


def test_the_form_with_fewer_multiplications_is_taken_and_training_makes_keys():
    mine = MultiHeadLatentAttention(60, 60, 11, 6)
    mine.head_dim, mine.kv_rank = 64, 256
    # Per head: t C D + t s C over the latents, s C D + t s D with keys: level near t = 85.
    assert mine.absorbs(80, 8192)
    assert not mine.absorbs(90, 8192)
    assert not mine.absorbs(1, 1)
    mine.kv_rank = 8  # narrower than a head
    assert not mine.absorbs(11, 11)


def of_gpt2_small(*overrides: str) -> Any:
    with torch.device("meta"):
        return build_model(settings("model=gpt2_small", "attn=mla", *overrides), vocab_size=256)


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


def test_a_part_that_changes_heads_goes_to_the_layers_that_keep_them():
    parts = "part=[qk_norm,gate]"
    model = build_gpt("pattern=[mla,gqa]", parts, "position=none")
    taken = [{*dict(block.attention.parts.named_children())} for block in model.layers()]
    assert taken == [{"gate"}, {"qk_norm", "gate"}]
    with refuses("part: qk_norm"):
        build_gpt("pattern=[mla,gated_deltanet]", parts, "position=none")
