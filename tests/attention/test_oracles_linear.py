"""kda, mamba2 and lightning against transformers' classes and their definitions; their state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from building import build_gpt, disturb
from contract import assert_same, decode, draw
from hugging import (
    B,
    E,
    H,
    T,
    assert_agreement,
    keep_float64,
    pairs_of_mamba2,
)
from torch import Tensor, nn
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from gptattn.attention import Attention, Shared
from gptattn.attention.recurrence import step
from gptattn.attention.softmax import split_heads
from gptattn.attention.variants.kda import KimiDeltaAttention
from gptattn.attention.variants.lightning import LightningAttention
from gptattn.attention.variants.mamba2 import Mamba2
from gptattn.errors import ConfigError


def layer(kind: Callable[..., Attention], **settings: Any) -> Any:
    """A layer in float64 with noise on all its parameters, so that heads differ."""
    sizes = {"d_in": E, "d_out": E, "context_length": T, "num_heads": H, "out_bias": False}
    made = kind(**(sizes | settings))
    disturb(made, std=0.3)
    return made.double()


def run(theirs: nn.Module, **given: Any) -> Callable[[Tensor], Tensor]:
    """Return theirs as a function of x alone, in float64."""

    def call(x: Tensor) -> Tensor:
        with keep_float64():
            y = theirs(x, **given)
        return y[0] if isinstance(y, tuple) else y

    return call


def test_mamba2_with_groups_is_transformers():
    mine = layer(Mamba2, state_size=7, groups=2, head_dim=5, norm_eps=1e-3, chunk=4)
    with keep_float64():
        config = Mamba2Config(
            hidden_size=E,
            num_heads=mine.heads,
            head_dim=5,
            state_size=7,
            n_groups=2,
            layer_norm_epsilon=1e-3,
            chunk_size=8,
            num_hidden_layers=1,
        )
        theirs = Mamba2Mixer(config, layer_idx=0)
    pairs = pairs_of_mamba2(mine, theirs)
    assert_agreement(mine, run(theirs), pairs)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Decayed linear attention by its definition."""
    s, y = v.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1]), []
    for one in zip(*(x.unbind(2) for x in (q, k, v, g)), strict=True):
        y_BHV, s = step(*one, None, s)
        y.append(y_BHV)
    return torch.stack(y, 2)


def test_mamba2_is_decayed_linear_attention_and_a_skip_then_gate_and_norm():
    mine, x = layer(Mamba2, state_size=7, expand=1.0, conv_size=None, chunk=4), draw(B, T, E)
    q, k = (F.silu(W(x))[:, None].expand(-1, H, -1, -1) for W in (mine.W_query, mine.W_key))
    v = split_heads(F.silu(mine.W_value(x)), H)
    dt = F.softplus(mine.W_step(x) + mine.step_bias_H).mT
    y = recurrent(q, k, v * dt[..., None], -mine.a_log_H.exp()[:, None] * dt)
    y = (y + mine.skip_H[:, None, None] * v).transpose(1, 2).flatten(2) * F.silu(mine.W_gate(x))
    y = y / (y.square().mean(-1, keepdim=True) + mine.norm_eps).sqrt() * mine.gain_C
    assert_same(mine(x), mine.out_proj(y))


def test_lightning_is_linear_attention_with_the_fixed_decay_of_its_head_and_layer():
    mine, x = layer(LightningAttention, layer=1, num_layers=4, chunk=4), draw(B, T, E)
    inputs = (split_heads(F.silu(W(x)), H) for W in (mine.W_query, mine.W_key, mine.W_value))
    depth = 1 - 1 / (3 + 1e-5) + 1e-5
    g = -torch.exp2(-8 * torch.arange(1, H + 1).double() / H) * depth
    y = recurrent(*inputs, g[None, :, None].expand(B, H, T)).transpose(1, 2).flatten(2)
    y = y / (y.square().mean(-1, keepdim=True) + mine.norm_eps).sqrt() * mine.gain_C
    assert_same(mine(x), mine.out_proj(y * mine.W_gate(x).sigmoid()))


def test_lightning_is_told_its_layer_by_the_model():
    rates = [
        one.attention.log_decays(torch.float64)
        for one in build_gpt("attn=lightning", "model.num_layers=3").layers()
    ]
    first = torch.exp2(-8 * torch.arange(1, 7).double() / 6)
    assert_same(rates, [-first * (1 - i / (2 + 1e-5) + 1e-5) for i in range(3)])


def test_parameters_are_those_of_the_docstrings():
    d, H, D, N = 768, 12, 64, 128
    with torch.device("meta"):
        made = [kind(d, d, 1024, H) for kind in (KimiDeltaAttention, LightningAttention, Mamba2)]
    assert [sum(p.numel() for p in one.parameters()) for one in made] == [
        4 * d * d + 4 * d * D + d * H + 3 * d * 4 + d + H + D + d,
        5 * d * d + d + d,
        6 * d * d + 2 * d * (N + H) + (2 * d + 2 * N) * 5 + 6 * H + 2 * d + d,
    ]
    assert [one.flops(1, 1000) for one in made] == [
        7 * H * D * D,
        5 * H * D * D,
        5 * 2 * H * N * D,
    ]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("attn=kda attn.expand=0.5", "attn.expand: expand=0.5 makes heads of 2.5; give a multiple"),
        ("attn=kda attn.conv_size=12", "attn.conv_size: conv_size=12 is above context_length=11"),
        ("attn=lightning attn.chunk=0", "attn.chunk: chunk=0 must be 1 or more tokens"),
        ("attn=mamba2 attn.state_size=0", "attn.state_size: state_size=0 must be positive"),
        ("attn=mamba2 attn.groups=5", "attn.groups: groups=5 must divide 12 heads; one of"),
        (
            "attn=mamba2 attn.head_dim=7",
            "attn.expand: expand=2.0 makes 60 channels, not a",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(chosen, said):
    with pytest.raises(ConfigError, match=said):
        build_gpt(*chosen.split())


KINDS = pytest.mark.parametrize("kind", [KimiDeltaAttention, LightningAttention, Mamba2])


@KINDS
def test_a_token_at_a_time_is_the_full_pass(kind):
    mine = layer(kind, chunk=4)
    x = draw(B, T, E)
    assert_same(decode(mine, x, [1] * T), mine(x))


@KINDS
def test_padding_on_the_left_leaves_no_trace(kind):
    mine = layer(kind, chunk=4)
    x = draw(B, T, E)
    cache, missing, y = mine.new_cache(B, T), torch.tensor([[0], [3]]), []
    for start, part in zip([0, 5, 6], x.split([5, 1, T - 6], dim=1), strict=True):
        positions = torch.arange(start, start + part.shape[1]) - missing
        y.append(mine(part, cache, Shared(positions.clamp_min(-1))))
        cache.advance(part.shape[1])
    assert_same(torch.cat(y, 1)[1, 3:], mine(x[1:, 3:])[0])


@KINDS
def test_the_state_is_constant_and_in_float32_or_wider(kind):
    made = layer(kind, context_length=10_000).bfloat16()
    few, many = made.new_cache(3, 1), made.new_cache(3, 10_000)
    assert few.nbytes == many.nbytes
    assert few.tensors["state"].dtype == torch.float32
