"""Parts: what each adds in parameters and cache, how it starts, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from building import build_attention, build_gpt, disturb, menu, read_file, through_cache
from contract import assert_agree, assert_same, decode
from support import refuses
from torch import Tensor, nn

from gptattn.attention import Part, Rule, Shared, TokenCache
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


@pytest.mark.parametrize("part", ["xsa", "conv"])
def test_a_part_rounds_its_result_alone_to_bfloat16(part):
    layer = build_attention(f"gqa+{part}")
    (one,) = layer.parts.values()
    y, v = (torch.randn(B, n, T, D).bfloat16() for n in (H, G))
    results = [
        (one.mix(a, a, {"v": b}), *one.heads(a, b, b, Shared(range(T))))
        for a, b in ((y, v), (y.float(), v.float()))
    ]
    for rounded, wide in zip(*results, strict=True):
        assert torch.equal(rounded, wide.bfloat16())


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
    for name in ("forget", "gate", "conv"):
        model = build_gpt("attn=mha", "model.d_model=192", f"part={name}")
        part = model.layers()[0].attention.parts[name]
        for kind, parameter in part.named_parameters():
            if kind.endswith("bias"):
                assert not parameter.any()
            else:
                assert 0.018 < parameter.std() < 0.022
    norm = build_gpt("attn=gqa", "part=qk_norm").layers()[0].attention.parts["qk_norm"]
    assert all(torch.equal(gain, torch.ones(D)) for gain in norm.parameters())


def bare(variant: str, **settings) -> SoftmaxAttention:
    """One layer in float64 that writes its heads' outputs as they are."""
    torch.manual_seed(5)  # the same weights, with or without parts that have none
    attention = build_attention(variant, **settings).double()
    if attention.out_proj is not None:
        nn.init.eye_(attention.out_proj.weight)
        nn.init.zeros_(attention.out_proj.bias)
    return attention


@pytest.mark.parametrize("variant", ["gqa", "single_head", "tpa", "cross_layer", "differential"])
def test_xsa_removes_the_outputs_component_along_its_own_value(variant):
    plain, ours = bare(variant), bare(f"{variant}+xsa")
    ours.load_state_dict(plain.state_dict())
    x, size = torch.randn(B, T, E).double(), plain.head_dim * (1 + (variant == "differential"))
    if variant == "tpa":  # a sum of two outer products
        a_BTCH = plain.W_value_a(x).unflatten(-1, (2, H)) / 2
        v = torch.einsum("btch,btcd->bthd", a_BTCH, plain.W_value_b(x).unflatten(-1, (2, D)))
    else:
        v = plain.W_value(x).unflatten(-1, (-1, size))
    shared = Shared(range(T))
    y, z = (one(x, None, shared).unflatten(-1, (-1, size)) for one in (plain, ours))
    v = v.repeat_interleave(y.shape[2] // v.shape[2], 2)
    zero = torch.zeros(y.shape[:3]).double()
    assert_same((z * v).sum(-1), zero)
    assert_same(z, y - (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v)
    if variant == "cross_layer":  # the layer after it has the same values
        z = bare("cross_layer+xsa", layer=1)(x + 1, None, shared).unflatten(-1, (-1, size))
        assert_same((z * v).sum(-1), zero)


def convolved(x: Tensor, weight_C1K: Tensor) -> Tensor:
    """x + the convolution, token by token."""
    K, rows = weight_C1K.shape[2], [*x.unbind(1)]
    for t in range(x.shape[1]):
        for i in range(max(0, K - 1 - t), K):
            rows[t] = rows[t] + weight_C1K[:, 0, i] * x[:, t - K + 1 + i]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("variant", ["gqa+gate", "mla"])
def test_a_convolved_input_is_what_all_of_the_attention_gets(variant):
    plain, whole = (build_attention(variant) for _ in range(2))
    add_parts(
        whole, {"conv": read_file("part", "conv") | {"size": 3, "targets": ["input"]}}, layer=0
    )
    disturb(whole.parts["conv"], std=0.5)
    whole.double().load_state_dict(plain.double().state_dict(), strict=False)
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    weight = whole.get_parameter("parts.conv.convolutions.input.weight_C1K")
    assert_agree(whole(x), plain(convolved(x, weight)), [x, weight])
    maps = plain.attention_weights(convolved(x, weight))
    assert_same(whole.attention_weights(x), maps)


EVERYWHERE, IN_INPUT = "part.conv.targets=[q,k,v,input]", "part.conv.targets=[input]"


@pytest.mark.parametrize(
    "given",
    [
        ("attn=cross_layer", "part=[conv,xsa,forget]", EVERYWHERE, "attn.window=3"),
        ("attn=mla", "part=[conv]", IN_INPUT, "position=rope"),
        ("attn=tpa", "part=[xsa,conv]", IN_INPUT, "part.conv.size=2"),
    ],
)
@torch.no_grad()
def test_convolutions_act_the_same_in_chunks_padded_rows_and_documents(given):
    model = build_gpt(*given, "model.d_model=36", "model.num_layers=4", std=0.3).double().eval()
    prompts = [torch.randint(13, (length,)) for length in (T, 1, 5)]
    padded, padding = pad_left(prompts)
    y = through_cache(model, padded, model.new_cache(3, padding_B=padding), [2, 5, 1, 3])
    for row, (prompt, pad) in enumerate(zip(prompts, padding, strict=True)):
        assert_same(y[row, pad:], model(prompt[None])[0])
    ids, numbers = prompts[0][None], torch.tensor([[0] * 4 + [1] * 7])
    assert_same(model.hidden(ids, None, numbers)[:, 4:], model.hidden(ids[:, 4:]))


@torch.no_grad()
def test_caches_of_other_kinds_keep_a_convolutions_inputs():
    # Heads of 10: smaller ones are not packed.
    whole, window = (bare("gqa+conv", window=w, d_out=60).eval() for w in (None, 4))
    x = torch.randn(B, T, E).double()
    kept = parse_cache_kind("window:4").replace_cache(whole.new_cache(B, T), whole)
    assert_same(decode(whole, x, [1] * T, kept), window(x))
    packed = parse_cache_kind("bf16").replace_cache(whole.new_cache(B, T), whole)
    assert {"k/numbers", "conv_k", "conv_v"} < {*packed.tensors}
    assert_same(decode(whole, x, [5, 1, 3, 2], packed), whole(x), atol=0.1)


class Doubled(Part):
    def mix(self, y_BHTD: Tensor, x_BTE: Tensor) -> Tensor:  # lacks this step's entries
        return 2 * y_BHTD


def test_parts_that_do_not_fit_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^doubled.*mix\(self"):
        gqa().add_part("doubled", Doubled())
    for field, given in {
        "part: xsa": "attn=mla part=xsa",
        "part: conv": "attn=mamba2 part=conv position=none",
        "part.conv.targets: ": "part=conv part.conv.targets=[z]",
        "part.conv.size: ": "part=conv part.conv.size=5",
    }.items():
        with refuses(field):
            build_gpt(*given.split())


class Nearest(Part):
    def rule(self, rule: Rule, new: object, held: object) -> Rule:
        return replace(rule, bias=lambda query, key: key.pos - query.pos)


@pytest.mark.parametrize("variant", ["dsa", "nsa"])
def test_a_bias_is_refused_where_scores_choose_the_keys(variant):
    layer = build_attention(variant)
    layer.add_part("nearest", Nearest())
    with refuses("part: bias"):
        layer(torch.randn(1, 7, layer.d_in))
