"""Multi-head attention against torch's own module, the textbook's forms, and what is refused."""

import dataclasses

import pytest
import torch
from building import build_attention
from contract import assert_same, draw
from torch import nn

from gptattn.attention import HeadWeights, Rule, SelfAttentionV1, SelfAttentionV2, attend
from gptattn.attention.base import window_of

B, T, D_IN, D_OUT, H = 2, 11, 7, 30, 6


def repeated(weights: HeadWeights, times: int) -> HeadWeights:
    """Return the same weights with one key/value head per query head: 0, 0, 0, 1, 1, 1, ..."""
    names = ("k_GDE", "v_GDE", "k_bias_GD", "v_bias_GD")
    return dataclasses.replace(
        weights, **{name: getattr(weights, name).repeat_interleave(times, 0) for name in names}
    )


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
        ("gqa", {"num_kv_heads": 4}, r"num_kv_heads=4 must divide num_heads=6; .*\[1, 2, 3, 6\]"),
        ("gqa", {"num_kv_heads": 0}, r"num_kv_heads=0 "),
        ("mha", {"dropout": 1.0}, r"dropout=1.0 "),
        ("mha_wrapper", {"dropout": -0.1}, r"dropout=-0.1 "),
        ("mha", {"backend": "flush"}, r"backend=flush is unknown; .*'reference', 'sdpa'"),
    ],
)
def test_impossible_arguments_are_refused_by_name(variant, overrides, message):
    module = type(build_attention(variant))
    arguments = {"d_in": D_IN, "d_out": D_OUT, "context_length": T, "num_heads": H} | overrides
    # Not through the config, whose own check would fail first.
    with pytest.raises(ValueError, match=f"^{message}"):
        module(**arguments)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (
            ("gqa", {}),
            ("mha_wrapper", {}),
            r"key weight has shape \[2, 5, 7\], .* needs \[6, 5, 7\]",
        ),
        (("mha", {"qkv_bias": False}), ("mha", {}), "query bias"),
        (("mha", {"out_proj": False}), ("mha_wrapper", {}), "output weight"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(source, target, message):
    sizes = {"d_in": D_IN, "d_out": D_OUT, "num_heads": H}
    weights = build_attention(source[0], **sizes, **source[1]).export_heads()
    with pytest.raises(ValueError, match=message):
        build_attention(target[0], **sizes, **target[1]).load_heads(weights)


@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_the_textbook_forms_take_any_leading_dimensions_and_agree(leading):
    v1, v2 = SelfAttentionV1(D_IN, 5).double(), SelfAttentionV2(D_IN, 5).double()
    x = draw(*leading, T, D_IN)
    y = v1(x)
    q, k, v = x @ v1.W_query, x @ v1.W_key, x @ v1.W_value
    w = torch.einsum("...td,...sd->...ts", q, k).div(5**0.5).exp()
    assert_same(y, torch.einsum("...ts,...sd->...td", w / w.sum(-1, keepdim=True), v))
    v1.load_from(v2)
    assert_same(v1(x), v2(x))
    with pytest.raises(ValueError, match=r"^qkv_bias="):
        v1.load_from(SelfAttentionV2(D_IN, 5, qkv_bias=True))


def test_dropout_in_blocks_draws_the_same_mask_again_in_backward():
    q, k, v = (torch.randn(2, heads, 300, 5, dtype=torch.float64) for heads in (6, 2, 2))
    v.requires_grad_()
    y = attend(q, k, v, Rule(0.3), dropout=0.25, backend="sdpa")
    upstream = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, v, upstream)
    # Outputs are linear in the values, with the same weights forward and backward.
    assert_same((gradient * v).sum(), (upstream * y).sum(), atol=1e-9)


def test_a_share_of_the_context_is_rounded_up_as_one_counts():
    cases = [(0.07, 100), (0.55, 100), (0.14, 50), (0.28, 50), (0.25, 11), (0.001, 100)]
    assert [window_of(share, context) for share, context in cases] == [7, 55, 7, 14, 3, 1]
