"""Gated DeltaNet: its state, costs, start and refusals; test_recipes.py has it as released."""

from typing import Any

import pytest
import torch
from building import build_attention, build_gpt, disturb, through_cache
from contract import assert_same, decode, draw
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gptattn.attention.recurrence import chunked_delta
from gptattn.attention.variants.gated_deltanet import GatedDeltaNet
from gptattn.errors import ConfigError

B, T, H, D, V = 2, 11, 6, 5, 7
E = 60


def drawn(tokens: int) -> list[Tensor]:
    """Queries, keys of length 1, values, log decays and write strengths, in float64."""
    k = torch.nn.functional.normalize(draw(B, H, tokens, D), dim=-1)
    g, beta = -draw(B, H, tokens).exp(), draw(B, H, tokens).sigmoid()
    return [draw(B, H, tokens, D), k, draw(B, H, tokens, V), g, beta]


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


def test_the_state_is_constant_and_in_float32_or_wider():
    attention = build_attention("gated_deltanet", context_length=10_000)
    few, many = attention.new_cache(3, 1), attention.new_cache(3, 10_000)
    assert few.nbytes == many.nbytes == 3 * (6 * 5 * 5 + 3 * 3 * 30) * 4
    half = attention.bfloat16().new_cache(1, 1).tensors
    assert (half["state"].dtype, half["tail"].dtype) == (torch.float32, torch.bfloat16)


def test_parameters_and_flops_are_those_of_the_docstring():
    with torch.device("meta"):
        small = GatedDeltaNet(768, 768, 1024, 12)
        papers = GatedDeltaNet(768, 768, 1024, 12, expand_k=0.75, expand_v=1.5, out_bias=False)
    own = 3 * 768 * 4 + 2 * 12 + 64
    assert sum(p.numel() for p in small.parameters()) == 5 * 768**2 + 2 * 768 * 12 + own + 768
    weights = [p for p in papers.parameters() if p.ndim > 1 and min(p.shape) > 12]
    assert sum(weight.numel() for weight in weights) == 6 * 768**2
    assert small.flops(1, 1000) == 12 * 7 * 64 * 64  # the recurrence, as it decodes


@pytest.mark.parametrize(("tokens", "chunk"), [(12, 4), (11, 4), (7, 64)])
def test_flops_in_training_are_the_products_and_the_solve_of_the_chunks(tokens, chunk):
    with FlopCounterMode(display=False) as products:
        chunked_delta(*drawn(tokens), None, chunk)
    N = -(-tokens // chunk)
    C = -(-tokens // N)
    solve = N * C * (C - 1) * (V + D)  # which torch does not count
    model = layer(d_in=H * D, d_out=H * D, expand_v=V / D, chunk=chunk)
    assert B * (model.flops(tokens, tokens) - H * solve) == products.get_total_flops()


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
    assert made.conv.weight_C1K is not None
    assert 0.48 < made.conv.weight_C1K.abs().max() <= 0.5


def test_it_takes_no_position_alone_and_beside_layers_that_do():
    with pytest.raises(ConfigError, match="gated_deltanet knows the order of the tokens without"):
        build_gpt("attn=gated_deltanet", "position=rope", "model.d_model=36")
    mixed = build_gpt("pattern=[gated_deltanet,gqa]", "position=rope", "model.d_model=36")
    ids = torch.randint(13, (B, T))
    with torch.no_grad():
        expected = mixed(ids)
        got = through_cache(mixed, ids, mixed.new_cache(B), [4, 1, 6])
    assert_same(got, expected, atol=1e-5)
    assert mixed.layers_with_maps() == [1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("conv_size=-1", "attn.conv_size: conv_size=-1 is negative"),
        ("chunk=0", "attn.chunk: chunk=0 must be 1 or more"),
        ("norm_eps=inf", "attn.norm_eps: norm_eps=inf must be a positive number; 1e-5 is usual"),
        ("expand_v=1.5", "attn.expand_v: expand_v=1.5 makes heads of 7.5; give a multiple of 1/5"),
        ("conv_size=12", "attn.conv_size: conv_size=12 is above context_length=11; 4 is usual"),
    ],
)
def test_settings_that_cannot_work_are_named(setting, said):
    with pytest.raises(ConfigError, match=said):
        build_gpt("attn=gated_deltanet", f"attn.{setting}")
