"""Variants against each other, against loops worked by hand, and against torch's own module."""

import dataclasses
from copy import deepcopy

import pytest
import torch
from building import Allocations, build_attention
from torch import Tensor, nn

from gptattn.attention import (
    Attention,
    CacheGroup,
    Entry,
    HasHeads,
    HeadWeights,
    Rule,
    SelfAttentionV1,
    SelfAttentionV2,
    attend,
    new_token_cache,
)

BACKENDS = pytest.mark.parametrize("backend", ["reference", "sdpa"])
B, T, D_IN, D_OUT, H = 2, 11, 7, 30, 6


def build(variant: str, **overrides) -> Attention:
    return build_attention(variant, d_in=D_IN, d_out=D_OUT, num_heads=H, **overrides).double()


def results(attention: Attention, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Return the output and all gradients: those of the weights in the layout of `export_heads`."""
    x = x.clone().requires_grad_()
    y = attention(x)
    (y * upstream).sum().backward()
    holder = deepcopy(attention)
    for mine, theirs in zip(holder.parameters(), attention.parameters(), strict=True):
        mine.data = theirs.grad
    gradients = {name: g for name, g in vars(holder.export_heads()).items() if g is not None}
    return {"y": y, "x": x.grad, **gradients}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def repeated(weights: HeadWeights, times: int) -> HeadWeights:
    """Return the same weights with one key/value head per query head: 0, 0, 0, 1, 1, 1, ..."""
    names = ("k_GDE", "v_GDE", "k_bias_GD", "v_bias_GD")
    return dataclasses.replace(
        weights, **{name: getattr(weights, name).repeat_interleave(times, 0) for name in names}
    )


def assert_same(actual: object, expected: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@BACKENDS
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("mha", {}), ("mha_wrapper", {})),
        (("mha", {}), ("gqa", {"num_kv_heads": H})),
        (("mha", {"out_proj": False}), ("mha_wrapper", {"out_proj": False})),
        (("mha", {"qkv_bias": False}), ("mha_wrapper", {"qkv_bias": False})),
        (("mha", {"scale": 0.3}), ("mha_wrapper", {"scale": 0.3})),
        (("mqa", {}), ("gqa", {"num_kv_heads": 1})),
    ],
    ids=str,
)
def test_forms_of_the_same_attention_agree_in_outputs_and_gradients(one, other, backend):
    first = build(one[0], **one[1], backend=backend)
    second = build(other[0], **other[1], backend=backend)
    second.load_heads(first.export_heads())
    x, upstream = draw(B, T, D_IN), draw(B, T, D_OUT)
    assert_same(results(first, x, upstream), results(second, x, upstream))


@BACKENDS
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_grouped_attention_is_multi_head_attention_with_repeated_heads(groups, backend):
    grouped = build("gqa", num_kv_heads=groups, backend=backend)
    full = build("mha", backend=backend)
    full.load_heads(repeated(grouped.export_heads(), H // groups))
    x, upstream = draw(B, T, D_IN), draw(B, T, D_OUT)
    expected = results(full, x, upstream)
    for name in ("k_GDE", "v_GDE", "k_bias_GD", "v_bias_GD"):
        # A shared head's gradient is the sum over the query heads that share it.
        expected[name] = expected[name].unflatten(0, (groups, -1)).sum(1)
    assert_same(results(grouped, x, upstream), expected)


@pytest.mark.parametrize(
    ("variant", "groups"), [("mha", H), ("mha_wrapper", H), ("gqa", 2), ("mqa", 1)]
)
def test_outputs_weights_and_gradients_match_torchs_multihead_attention(variant, groups):
    ours = build_attention(variant).double()
    width = ours.d_out
    weights = repeated(ours.export_heads(), H // groups)
    theirs = nn.MultiheadAttention(width, H, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        qkv = (weights.q_HDE, weights.k_GDE, weights.v_GDE)
        biases = (weights.q_bias_HD, weights.k_bias_GD, weights.v_bias_GD)
        theirs.in_proj_weight.copy_(torch.cat([w.flatten(0, 1) for w in qkv]))
        theirs.in_proj_bias.copy_(torch.cat([b.flatten() for b in biases]))
        theirs.out_proj.weight.copy_(weights.out_EHD.flatten(1))
        theirs.out_proj.bias.copy_(weights.out_bias_E)
    x = draw(B, T, width).requires_grad_()
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    y, w = theirs(x, x, x, attn_mask=future, average_attn_weights=False)
    assert_same(ours(x), y)
    assert_same(ours.attention_weights(x), w)
    upstream = draw(B, T, width)
    assert_same(
        torch.autograd.grad(ours(x), x, upstream), torch.autograd.grad(y, x, upstream), atol=1e-11
    )


@pytest.mark.parametrize(
    ("variant", "overrides", "message"),
    [
        ("mha", {"num_heads": 7}, r"num_heads=7 must divide d_out=30 .*\[1, 2, 3, 5, 6, 10, 15"),
        ("mha", {"num_heads": 0}, r"num_heads=0 "),
        ("mha_wrapper", {"num_heads": 7}, r"num_heads=7 "),
        ("gqa", {"num_heads": 7}, r"num_heads=7 "),
        ("gqa", {"num_kv_heads": 4}, r"num_kv_heads=4 must divide num_heads=6; .*\[1, 2, 3, 6\]"),
        ("gqa", {"num_kv_heads": 0}, r"num_kv_heads=0 "),
        ("gqa", {"num_kv_heads": -2}, r"num_kv_heads=-2 "),
        ("mha", {"dropout": 1.0}, r"dropout=1.0 "),
        ("mha_wrapper", {"dropout": -0.1}, r"dropout=-0.1 "),
        ("single_head", {"dropout": 1.5}, r"dropout=1.5 "),
        ("mha", {"backend": "flush"}, r"backend=flush is unknown; .*'reference', 'sdpa'"),
        ("mha_wrapper", {"backend": "flush"}, r"backend=flush "),
    ],
)
def test_impossible_arguments_are_refused_by_name(variant, overrides, message):
    module = type(build_attention(variant))
    arguments = {"d_in": D_IN, "d_out": D_OUT, "context_length": T, "num_heads": H} | overrides
    if variant == "single_head":
        del arguments["num_heads"]
    # Not through the config, whose own check would fail first.
    with pytest.raises(ValueError, match=f"^{message}"):
        module(**arguments)


def test_a_foreign_cache_is_refused(variant):
    attention = build(variant)
    with pytest.raises(TypeError, match="CacheGroup is not this module's"):
        attention(draw(B, 1, D_IN), CacheGroup([attention.new_cache(B, T)]))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (("gqa", {}), ("mha", {}), "key weight"),
        (("mha", {}), ("mqa", {}), "key weight"),
        (
            ("gqa", {}),
            ("mha_wrapper", {}),
            r"key weight has shape \[2, 5, 7\], .* needs \[6, 5, 7\]",
        ),
        (("mha", {"qkv_bias": False}), ("mha", {}), "query bias"),
        (("mha", {}), ("mha_wrapper", {"qkv_bias": False}), "query bias"),
        (("mha", {}), ("mha", {"out_proj": False}), "output weight"),
        (("mha", {"out_proj": False}), ("mha_wrapper", {}), "output weight"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(source, target, message):
    weights = build(source[0], **source[1]).export_heads()
    with pytest.raises(ValueError, match=message):
        build(target[0], **target[1]).load_heads(weights)


def test_weights_of_another_head_size_are_refused():
    weights = build_attention("mha", num_heads=6).export_heads()
    with pytest.raises(ValueError, match="head"):
        build_attention("mha", num_heads=5).load_heads(weights)


def test_exported_weights_are_copies(variant):
    attention = build_attention(variant)
    if not isinstance(attention, HasHeads):
        pytest.skip("has no heads to export")
    exported = [w for w in vars(attention.export_heads()).values() if w is not None]
    before = [w.clone() for w in exported]
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.zero_()
    assert all(torch.equal(a, b) for a, b in zip(exported, before, strict=True))
    assert not any(w.requires_grad for w in exported)


@pytest.mark.parametrize("groups", [1, 2])
def test_keys_and_values_are_never_copied_per_query_head(groups):
    length, head = 512, 5
    q = torch.randn(1, H, length, head, requires_grad=True)
    k, v = (torch.randn(1, groups, length, head, requires_grad=True) for _ in range(2))
    with Allocations() as forward:
        y = attend(q, k, v, Rule(0.4))
    # The output and one number per query: no memory for keys repeated per query head.
    assert sum(forward.elements) <= y.numel() + H * length
    with Allocations() as backward:
        y.sum().backward()
    assert max(backward.elements) <= y.numel()
    with Allocations() as decode, torch.no_grad():
        attend(q[:, :, -1:], k, v, Rule(0.4), q_pos=range(length - 1, length), k_pos=range(length))
    assert sum(decode.elements) < length


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_the_textbook_forms_take_any_leading_dimensions_and_each_others_weights(leading):
    v1, v2 = SelfAttentionV1(D_IN, 5).double(), SelfAttentionV2(D_IN, 5, qkv_bias=True).double()
    v2.load_from(v1)
    x = draw(*leading, T, D_IN)
    y = v1(x)
    assert y.shape == (*leading, T, 5)
    assert_same(v2(x), y)
    q, k, v = x @ v1.W_query, x @ v1.W_key, x @ v1.W_value
    w = torch.einsum("...td,...sd->...ts", q, k).div(5**0.5).exp()
    assert_same(y, torch.einsum("...ts,...sd->...td", w / w.sum(-1, keepdim=True), v))
    other = SelfAttentionV1(D_IN, 5).double()
    other.load_from(SelfAttentionV2(D_IN, 5).double())
    assert not torch.allclose(other(x), y)
    with pytest.raises(ValueError, match=r"^qkv_bias="):
        other.load_from(v2)


def test_dropout_in_blocks_draws_the_same_mask_again_in_backward():
    q, k, v = (torch.randn(2, heads, 300, 5, dtype=torch.float64) for heads in (6, 2, 2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(7)
    y = attend(*inputs, Rule(0.3), dropout=0.25, backend="sdpa")
    torch.manual_seed(7)
    edges = [(0, 128), (128, 256), (256, 300)]
    rule, plainly = Rule(0.3), {"dropout": 0.25, "backend": "reference"}
    plain = [
        attend(
            q[:, :, a:b],
            k[:, :, :b],
            v[:, :, :b],
            rule,
            q_pos=range(a, b),
            k_pos=range(b),
            **plainly,
        )
        for a, b in edges
    ]
    expected = torch.cat(plain, dim=2)
    assert torch.equal(y, expected)
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, inputs, upstream)
    for gradient, wanted in zip(got, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_dropout_never_makes_a_square_matrix_of_weights():
    module = build_attention("mha", num_heads=1, d_in=5, d_out=5, context_length=1024, dropout=0.1)
    with Allocations() as made:
        module(torch.randn(1, 1024, 5)).sum().backward()
    assert max(made.elements) <= 128 * 1024


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mha_wrapper"])
def test_nothing_in_gives_nothing_out(variant, shape):
    attention = build_attention(variant)
    x = torch.randn(*shape, attention.d_in)
    assert attention(x).shape == x.shape
    assert attention(x, attention.new_cache(shape[0], 5)).shape == x.shape


@pytest.mark.parametrize(("k", "v"), [((2, 1, 3, 8), (2, 4, 3, 8)), ((2, 4, 3, 8), (2, 4, 1, 8))])
def test_a_cache_takes_no_part_of_keys_or_values_for_all(k, v):
    entry = Entry(heads=4, size=8)
    cache = new_token_cache({"k": entry, "v": entry}, 2, 5, torch.float32, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"does not fit the cache, whose [kv] takes \(2, 4, \d, 8\)"
    ):
        cache.write({"k": torch.zeros(k), "v": torch.zeros(v)})
