"""What one mechanism has of its own; test_recipes.py has each as released, test_costs.py its costs.

Latent attention, differential attention and Gated DeltaNet.
"""

import math

import pytest
import torch
from building import build_gpt, disturb, through_cache
from contract import assert_same, decode, draw
from support import refuses

from gptattn.attention import DifferentialAttention, GatedDeltaNet, MultiHeadLatentAttention

B, T, H, D = 2, 11, 6, 10
E = H * D


def test_mla_picks_the_cheaper_form_and_makes_keys_in_training():
    mine = MultiHeadLatentAttention(60, 60, 11, 6)
    mine.head_dim, mine.kv_rank = 64, 256
    # Per head: t C D + t s C over the latents, s C D + t s D with keys: level near t = 85.
    assert mine.absorbs(80, 8192)
    assert not mine.absorbs(90, 8192)
    assert not mine.absorbs(1, 1)
    mine.kv_rank = 8  # narrower than a head
    assert not mine.absorbs(11, 11)


def test_a_part_that_changes_heads_goes_to_the_layers_that_keep_them():
    parts = "part=[qk_norm,gate]"
    model = build_gpt("pattern=[mla,gqa]", parts, "position=none")
    taken = [{*dict(block.attention.parts.named_children())} for block in model.layers()]
    assert taken == [{"gate"}, {"qk_norm", "gate"}]
    with refuses("part: qk_norm"):
        build_gpt("pattern=[mla,gated_deltanet]", parts, "position=none")


def test_differential_attention_starts_as_in_the_paper():
    model = build_gpt("attn=differential", "model.d_model=600", "model.num_layers=2")
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        assert isinstance(attention, DifferentialAttention)
        drawn = torch.cat([attention.lambda_q1_D, attention.lambda_k1_D, attention.lambda_q2_D])
        assert drawn.std().item() == pytest.approx(0.1, rel=0.15)
        assert torch.equal(attention.norm_gain, torch.ones(200))
        assert attention.lambda0 == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * layer))


def test_dropout_drops_each_of_the_two_softmaxes_of_differential_attention():
    attention = DifferentialAttention(E, E, T, H, out_proj=False, dropout=0.5).double().train()
    x = draw(61, 1, E)
    y = attention(x).unflatten(-1, (H // 2, 2 * D))
    v = attention.W_value(x).unflatten(-1, (H // 2, 2 * D))
    # One token: each softmax is 2 or 0, and the norm leaves of their difference only the sign.
    signs = (y * v).sum(-1).sign().unique().tolist()
    assert signs == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize(("conv_size", "chunk"), [(None, 64), (1, 1), (2, 3), (7, 4)])
def test_gated_deltanet_with_convolutions_decodes_as_it_reads_in_any_chunk(conv_size, chunk):
    attention = GatedDeltaNet(E, E, T, H, conv_size=conv_size, chunk=chunk, expand_k=0.5).double()
    disturb(attention, std=0.3)
    x = draw(B, T, E)
    assert_same(decode(attention, x, [3, 1, 5, 1, 1]), attention(x))


def test_the_first_decays_of_gated_deltanet_are_those_of_the_authors():
    made = GatedDeltaNet(61, 61, 7, 61)
    with torch.no_grad():
        made.initialise(0.02)
    rate, step = made.a_log_H.exp(), torch.nn.functional.softplus(made.decay_bias_H)
    assert 0 < rate.min() < 2
    assert 14 < rate.max() < 16
    assert 1e-3 <= step.min() < 2e-3
    assert 5e-2 < step.max() <= 0.1 + 1e-6
    assert made.W_query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert 0.48 < made.conv.weight_C1K.abs().max() <= 0.5


def test_gated_deltanet_takes_no_position_alone_and_beside_layers_that_do():
    with refuses("position: gated_deltanet"):
        build_gpt("attn=gated_deltanet", "position=rope", "model.d_model=36")
    mixed = build_gpt("pattern=[gated_deltanet,gqa]", "position=rope", "model.d_model=36")
    ids = torch.randint(13, (B, T))
    with torch.no_grad():
        expected = mixed(ids)
        got = through_cache(mixed, ids, mixed.new_cache(B), [4, 1, 6])
    assert_same(got, expected, atol=1e-5)
    assert mixed.layers_with_maps() == [1]
