"""The value residual in whole models, against its formula written as a loop."""

import re

import pytest
import torch
from building import WITH_PROBES, build_gpt, chosen
from contract import assert_same
from torch import Tensor

from gptattn.attention.parts.value_residual import ValueResidual
from gptattn.attention.variants.gqa import GroupedQueryAttention
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT

T = 7


def by_loop(model: GPT, ids: Tensor) -> Tensor:
    """The hidden states [B, T, E] of a model of `gqa`, one query head and token at a time."""
    x, first = model.token_embedding(ids), torch.empty(0)
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        assert isinstance(attention, GroupedQueryAttention)
        size, groups = attention.head_dim, attention.num_kv_heads
        normed = block.norm_attention(x)
        q = attention.W_query(normed).unflatten(-1, (attention.num_heads, size))
        k = attention.W_key(normed).unflatten(-1, (groups, size))
        v = attention.W_value(normed).unflatten(-1, (groups, size))
        if layer == 0:
            first = v
        else:
            own, of_first = attention.get_parameter("parts.value_residual.shares")
            v = own * v + of_first * first
        rows = []
        for t in range(ids.shape[1]):
            heads = []
            for h in range(attention.num_heads):
                g = h * groups // attention.num_heads
                score = torch.einsum("bd,bsd->bs", q[:, t, h], k[:, : t + 1, g]) / size**0.5
                heads.append(torch.einsum("bs,bsd->bd", score.softmax(-1), v[:, : t + 1, g]))
            rows.append(torch.cat(heads, dim=-1))
        assert attention.out_proj is not None
        x = x + attention.out_proj(torch.stack(rows, dim=1))
        assert block.mlp is not None
        assert block.norm_mlp is not None
        x = x + block.mlp(block.norm_mlp(x))
    return model.norm(x)


def test_later_layers_mix_in_the_values_of_the_first_as_a_loop_does():
    layers = ("model.num_layers=3", "position=none")
    model = build_gpt(*chosen("gqa+value_residual"), *layers, std=0.3).double()
    ids = torch.randint(13, (2, T))
    upstream = torch.randn(2, T, 30, dtype=torch.float64)
    results = []
    for y in (model.hidden(ids), by_loop(model, ids)):
        results.append([y, *torch.autograd.grad(y, [*model.parameters()], upstream)])
    assert_same(results[0], results[1], atol=1e-11)


def mixes(model: GPT) -> list[list[float] | None]:
    """The two numbers of each layer, or None."""
    states = [block.attention.state_dict() for block in model.layers()]
    mix = [state.get("parts.value_residual.shares") for state in states]
    return [None if numbers is None else numbers.tolist() for numbers in mix]


def test_both_numbers_of_each_layer_but_the_first_start_at_a_half():
    model = build_gpt(*chosen("mha+value_residual"), "model.num_layers=3")
    assert mixes(model) == [None, [0.5, 0.5], [0.5, 0.5]]
    without = build_gpt("attn=mha", "model.num_layers=3")
    assert model.new_cache(2).nbytes == without.new_cache(2).nbytes


def test_the_first_layer_that_has_values_leaves_them():
    pattern = "pattern=[probe_linear_state,gqa,probe_linear_state,gqa]"
    parts = ("part=[value_residual,gate]", "model.num_layers=4")
    model = build_gpt(pattern, *parts, "position=none", *WITH_PROBES, std=0.3).eval()
    assert [mix is None for mix in mixes(model)] == [True, True, True, False]
    ids = torch.randint(13, (2, T))
    with torch.no_grad():
        before = model(ids)
        model.layers()[1].attention.get_parameter("W_value.weight").mul_(2.0)
        assert not torch.allclose(model(ids), before)


def test_layers_whose_values_differ_in_heads_are_refused_in_one_line():
    said = (
        "layer 1 needs values (num_kv_heads=1, head_dim=5), and layer 0 provides others "
        "(num_kv_heads=2, head_dim=5); make these the same in both layers"
    )
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        build_gpt("pattern=[gqa,mqa]", "part=value_residual")
    assert caught.value.field == "pattern"


def test_a_pattern_with_one_layer_that_has_values_is_refused_in_one_line():
    said = "layer 1 provides values, and no later layer takes them; put one that does after it"
    given = ("pattern=[probe_linear_state,gqa]", "position=none", "part=value_residual")
    with pytest.raises(ConfigError, match=said) as caught:
        build_gpt(*given, *WITH_PROBES)
    assert caught.value.field == "pattern"


def test_a_model_of_one_layer_is_refused_in_one_line():
    said = "layer 0 provides values, and no later layer takes them; give the model more layers"
    with pytest.raises(ConfigError, match=said) as caught:
        build_gpt(*chosen("gqa+value_residual"), "model.num_layers=1")
    assert caught.value.field == "model.num_layers"


def test_a_layer_without_values_takes_no_part_in_it():
    part = ValueResidual(num_kv_heads=0, head_dim=5, provided={"values"})
    assert part.shares is None
    assert part.provides() == part.needs() == {}
