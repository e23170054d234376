"""Parts: what each adds in parameters and cache, how it starts, and what it refuses."""

from typing import Any

import pytest
import torch
from building import build_attention, build_gpt, disturb, menu, read_file, through_cache
from contract import assert_agree, assert_same, decode
from support import refuses
from torch import Tensor

from gptattn.attention import Part, Shared, TensorProductAttention, TokenCache
from gptattn.attention.parts.forget import Forget
from gptattn.attention.parts.gate import Gate
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.build.model import add_parts
from gptattn.decode.generate import pad_left
from gptattn.evaluate.caches import parse_cache_kind
from gptattn.model.cost import measure_cost

B, T, E, H, G, D = 2, 11, 30, 6, 2, 5  # building.SMALL
# The papers' formulas for one layer.
PARAMETERS = {"qk_norm": 2 * D, "gate": E * E, "sink": H, "softcap": 0, "forget": E * H + H}
PARAMETERS |= {"temperature": 0, "value_scale": 0, "xsa": 0, "conv": 2 * G * D * 4}
PARAMETERS |= {"value_residual": 1}  # on average: 2 in the second of two layers
# Bytes per token: a float32 for each head; three inputs of the convolutions, over the context.
CACHE = {"forget": H * 4, "conv": 3 * 2 * G * D * 4 / T}


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
    more = added.kv_bytes_per_token - plain.kv_bytes_per_token
    assert more == pytest.approx(layers * CACHE.get(part, 0))


def test_a_headwise_gate_has_a_number_per_head_and_scales_the_whole_head():
    attention = gqa("gate", granularity="headwise").double()
    gate = attention.parts["gate"]
    assert isinstance(gate, Gate)
    assert gate.W_gate.weight.shape == (H, E)
    assert gate.W_gate.bias is None
    y, x = torch.randn(B, H, T, D).double(), torch.randn(B, T, E).double()
    for h in range(H):
        expected = y[:, h] / (1 + torch.exp(-(x @ gate.W_gate.weight[h])))[..., None]
        assert_same(gate.mix(y, x, {})[:, h], expected)
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


# Each mechanism that has values per head: its own values of width D, or of pairs, from its weights.
def values_of(attention: Any, x: Tensor) -> Tensor:
    """The heads' own values [B, T, H, D], from the weights."""
    if isinstance(attention, TensorProductAttention):
        a = attention.W_value_a(x).unflatten(-1, (2, H)) / 2
        return torch.einsum("btch,btcd->bthd", a, attention.W_value_b(x).unflatten(-1, (2, D)))
    heads = getattr(attention, "heads", [attention])
    v = torch.cat([head.W_value(x) for head in heads], -1)
    v = v.unflatten(-1, (-1, attention.head_dim))
    return v.repeat_interleave(attention.num_heads // v.shape[2], 2)


@pytest.mark.parametrize("variant", ["gqa", "sliding", "mha_wrapper", "single_head", "tpa"])
def test_an_exclusive_output_is_the_plain_one_without_its_share_along_the_own_value(variant):
    plain = build_attention(variant).double()
    exclusive = build_attention(f"{variant}+xsa").double()
    exclusive.load_state_dict(plain.state_dict())
    for one in (plain, exclusive):
        if one.residual_writer() is not None:
            torch.nn.init.eye_(one.residual_writer().weight)
            torch.nn.init.zeros_(one.residual_writer().bias)
    x = torch.randn(B, T, E, dtype=torch.float64)
    y, z = (one(x).unflatten(-1, (one.num_heads, -1)) for one in (plain, exclusive))
    v = values_of(plain, x)
    assert_same((z * v).sum(-1), torch.zeros(z.shape[:3]).double())
    assert_same(z, y - (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v)
    assert not z[:, 0].abs().gt(1e-12).any()  # the first token sees itself alone


def test_pairs_of_heads_and_layers_that_reuse_values_are_exclusive_too():
    pair = build_attention("differential+xsa").double()
    torch.nn.init.eye_(pair.out_proj.weight)
    torch.nn.init.zeros_(pair.out_proj.bias)
    x = torch.randn(B, T, E, dtype=torch.float64)
    y_BTPX, v_BTPX = (y.unflatten(-1, (H // 2, 2 * D)) for y in (pair(x), pair.W_value(x)))
    assert_same((y_BTPX * v_BTPX).sum(-1), torch.zeros(B, T, H // 2).double())
    first, second = (build_attention("cross_layer+xsa", layer=i).double() for i in range(2))
    torch.nn.init.eye_(second.out_proj.weight)
    torch.nn.init.zeros_(second.out_proj.bias)
    shared, v_BT1D = Shared(range(T)), first.W_value(x).unsqueeze(2)
    first(x, None, shared)
    y_BTHD = second(x + 1, None, shared).unflatten(-1, (H, D))
    assert_same((y_BTHD * v_BT1D).sum(-1), torch.zeros(B, T, H).double())


def convolved(x: Tensor, weight_C1K: Tensor) -> Tensor:
    """x + the convolution, token by token."""
    y, K = x.clone(), weight_C1K.shape[2]
    for t in range(x.shape[1]):
        for i in range(max(0, K - 1 - t), K):
            y[:, t] = y[:, t] + weight_C1K[:, 0, i] * x[:, t - K + 1 + i]
    return y


@pytest.mark.parametrize("variant", ["gqa+gate", "mla", "sliding+forget"])
def test_a_convolved_input_is_what_all_of_the_attention_gets(variant):
    plain, whole = build_attention(variant).double(), build_attention(variant).double()
    spec = {"conv": read_file("part", "conv") | {"size": 3, "on": ["input"]}}
    add_parts(whole, spec, layer=0)
    disturb(whole.parts["conv"], std=0.5)
    whole.double().load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    weight = whole.get_parameter("parts.conv.convolutions.input.weight_C1K")
    assert_agree(whole(x), plain(convolved(x, weight)), [x, weight])
    maps = plain.attention_weights(convolved(x, weight))
    assert_same(whole.attention_weights(x), maps)


EVERYWHERE = "part.conv.on=[q,k,v,input]"


@pytest.mark.parametrize(
    "given",
    [
        ("attn=gqa", "part=[conv,xsa,forget]", EVERYWHERE, "position=rope"),
        ("attn=cross_layer", "part=[conv,xsa]", EVERYWHERE, "attn.window=3"),
        ("attn=mla", "part=[conv]", "part.conv.on=[input]", "position=rope"),
        ("attn=tpa", "part=[xsa,conv]", "part.conv.on=[input]", "part.conv.size=2"),
    ],
    ids=lambda given: given[0],
)
def test_convolutions_act_the_same_in_chunks_padded_rows_and_documents(given):
    sizes = ("model.d_model=36", "model.num_layers=4")
    model = build_gpt(*given, *sizes, std=0.3).double().eval()
    ids = torch.randint(13, (2, T))
    with torch.no_grad():
        read = model(ids)
        assert_same(through_cache(model, ids, model.new_cache(2), [5, 1, 3, 2]), read)
        prompts = [torch.randint(13, (length,)) for length in (8, 1, 5)]
        padded, padding = pad_left(prompts)
        y = through_cache(model, padded, model.new_cache(3, padding_B=padding), [2, 5, 1])
        for row, (prompt, pad) in enumerate(zip(prompts, padding, strict=True)):
            assert_same(y[row, pad:], model(prompt[None])[0])
        numbers = torch.tensor([[0] * 4 + [1] * 7, [0] * 1 + [1] * 10])
        y = model.hidden(ids, None, numbers)
        assert_same(y[0, 4:], model.hidden(ids[:1, 4:])[0])
        assert_same(y[1, 1:], model.hidden(ids[1:, 1:])[0])


@torch.no_grad()
def test_caches_of_other_kinds_keep_a_convolutions_inputs():
    # Heads of 10: smaller ones are not packed.
    made = (build_attention("gqa+conv", window=w, d_out=60) for w in (None, 4))
    whole, window = (one.double().eval() for one in made)
    window.load_state_dict(whole.state_dict())
    x = torch.randn(B, T, E, dtype=torch.float64)
    kept = parse_cache_kind("window:4").replace_cache(whole.new_cache(B, T), whole)
    assert_same(decode(whole, x, [1] * T, kept), window(x))
    packed = parse_cache_kind("bf16").replace_cache(whole.new_cache(B, T), whole)
    assert {"k/numbers", "conv_k", "conv_v"} < {*packed.tensors}
    assert_same(decode(whole, x, [5, 1, 3, 2], packed), whole(x), atol=0.1)


class Doubled(Part):
    """A part whose `mix` lacks this step's entries."""

    def mix(self, y_BHTD: Tensor, x_BTE: Tensor) -> Tensor:
        return 2 * y_BHTD


def test_parts_that_do_not_fit_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^doubled lacks an argument"):
        gqa().add_part("doubled", Doubled())
    with refuses("part: xsa"):
        build_gpt("attn=mla", "part=xsa")
    with refuses("part: conv"):
        build_gpt("attn=gated_deltanet", "part=conv", "position=none")
    for wrong, field in (("on=[]", "on"), ("on=[z]", "on"), ("size=5", "size")):
        with refuses(f"part.conv.{field}: "):
            build_gpt("attn=gqa", "part=conv", f"part.conv.{wrong}")
