"""Gated DeltaNet: its convolution, start and positions; test_recipes.py has it as released."""

from typing import Any

import pytest
import torch
from building import build_gpt, disturb, through_cache
from contract import assert_same, decode, draw
from support import refuses

from gptattn.attention.variants.gated_deltanet import GatedDeltaNet

B, T, H, E = 2, 11, 6, 60


def layer(**settings: Any) -> GatedDeltaNet:
    """A layer in float64 with noise on all its parameters, so that heads differ."""
    sizes = {"d_in": E, "d_out": E, "context_length": 131, "num_heads": H}
    made = GatedDeltaNet(**(sizes | settings))
    disturb(made, std=0.3)
    return made.double()


@pytest.mark.parametrize(("conv_size", "chunk"), [(None, 64), (1, 1), (2, 3), (7, 4)])
def test_convolutions_and_chunks_of_any_size_decode_as_they_read(conv_size, chunk):
    attention = layer(conv_size=conv_size, chunk=chunk, expand_k=0.5, context_length=T)
    x = draw(B, T, E)
    assert_same(decode(attention, x, [3, 1, 5, 1, 1]), attention(x))


def test_the_first_decays_are_those_of_the_authors():
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


def test_it_takes_no_position_alone_and_beside_layers_that_do():
    with refuses("position: gated_deltanet"):
        build_gpt("attn=gated_deltanet", "position=rope", "model.d_model=36")
    mixed = build_gpt("pattern=[gated_deltanet,gqa]", "position=rope", "model.d_model=36")
    ids = torch.randint(13, (B, T))
    with torch.no_grad():
        expected = mixed(ids)
        got = through_cache(mixed, ids, mixed.new_cache(B), [4, 1, 6])
    assert_same(got, expected, atol=1e-5)
    assert mixed.layers_with_maps() == [1]
