"""Multi-head attention against torch's own module; dropout in blocks; windows in shares."""

import dataclasses

import pytest
import torch
from building import build_attention
from contract import assert_agree, assert_same, draw
from torch import nn

from gptattn.attention import HeadWeights, Rule, attend
from gptattn.attention.base import window_of

B, T, H = 2, 11, 6


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
    assert_agree(ours(x), y, [x])
    assert_same(ours.attention_weights(x), w)


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
