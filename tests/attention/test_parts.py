"""Parts: what each adds in parameters and cache, how it starts, and what it refuses."""

import pytest
import torch
from building import build_attention, build_gpt, menu, read_file
from contract import assert_same

from gptattn.attention import TokenCache
from gptattn.attention.parts.forget import Forget
from gptattn.attention.parts.gate import Gate
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.build.model import add_parts
from gptattn.model.cost import measure_cost

B, T, E, H, G, D = 2, 11, 30, 6, 2, 5  # building.SMALL
# The papers' formulas for one layer.
PARAMETERS = {"qk_norm": 2 * D, "gate": E * E, "sink": H, "softcap": 0, "forget": E * H + H}
PARAMETERS |= {
    "temperature": 0,
    "value_scale": 0,
    "value_residual": 1,
}  # on average: 2 in the second of two layers
CACHE = {"forget": H * 4}  # bytes per token: a float32 for each head


def gqa(part: str = "", **settings) -> SoftmaxAttention:
    attention = build_attention("gqa")
    add_parts(attention, {part: read_file("part", part) | settings} if part else {}, layer=0)
    assert isinstance(attention, SoftmaxAttention)
    return attention


@pytest.mark.parametrize("part", menu("part"))
def test_a_part_adds_the_parameters_and_the_cache_of_its_papers_formula(part):
    with torch.device("meta"):
        plain = measure_cost(build_gpt("attn=gqa"))
        added = measure_cost(build_gpt("attn=gqa", f"part={part}"))
    layers = 2
    assert added.params - plain.params == layers * PARAMETERS[part]
    assert added.params_attention - plain.params_attention == layers * PARAMETERS[part]
    assert added.kv_bytes_per_token - plain.kv_bytes_per_token == layers * CACHE.get(part, 0)


def test_a_headwise_gate_has_a_number_per_head_and_scales_the_whole_head():
    attention = gqa("gate", granularity="headwise").double()
    gate = attention.parts["gate"]
    assert isinstance(gate, Gate)
    assert gate.W_gate.weight.shape == (H, E)
    assert gate.W_gate.bias is None
    y, x = torch.randn(B, H, T, D).double(), torch.randn(B, T, E).double()
    for h in range(H):
        expected = y[:, h] / (1 + torch.exp(-(x @ gate.W_gate.weight[h])))[..., None]
        assert_same(gate.mix(y, x)[:, h], expected)
    assert gate.output(y, x) is y


def test_the_running_sum_has_all_digits_where_the_rest_has_16_bits():
    length = 600
    forget = Forget(E, H)
    x = torch.randn(1, length, E)
    exact = forget.double().entries(x.double(), None)["log_forget"]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = forget.float().entries(x, None)["log_forget"]
    whole = forget.bfloat16().entries(x.bfloat16(), None)["log_forget"]
    for sums in (mixed, whole):
        assert sums.dtype == torch.float64
        # Logits of 8 bits are off by less than 1%; a sum in bfloat16 stops growing at 256.
        assert_same(sums.double(), exact, atol=0.01 * length)
        assert (sums.diff(dim=-2) < 0).all()
    cache = build_attention("gqa+forget").bfloat16().new_cache(B, T)
    assert isinstance(cache, TokenCache)
    assert {name: x.dtype for name, x in cache.tensors.items()} == {
        "k": torch.bfloat16,
        "v": torch.bfloat16,
        "log_forget": torch.float32,
    }


@torch.no_grad()
def test_parts_start_as_their_papers_say():
    torch.manual_seed(3)
    model = build_gpt("attn=gqa", "model.d_model=192", "model.num_heads=96", "part=sink")
    sinks = torch.cat([block.attention.parts["sink"].sink_H for block in model.layers()])
    assert 0.015 < sinks.std() < 0.025  # 192 draws from N(0, 0.02)
    for name in ("forget", "gate"):
        model = build_gpt("attn=gqa", "model.d_model=192", f"part={name}")
        part = model.layers()[0].attention.parts[name]
        for kind, parameter in part.named_parameters():
            if kind.endswith("bias"):
                assert not parameter.any()
            else:
                assert 0.018 < parameter.std() < 0.022
    norm = build_gpt("attn=gqa", "part=qk_norm").layers()[0].attention.parts["qk_norm"]
    assert all(torch.equal(gain, torch.ones(D)) for gain in norm.parameters())
