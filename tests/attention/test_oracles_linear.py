"""The mechanisms that keep a state against transformers' classes with the same weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from building import disturb
from contract import assert_same, decode, draw
from hugging import B, E, H, Pair, T, assert_agreement, keep_float64
from torch import Tensor, nn
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from gptattn.attention import Attention
from gptattn.attention.variants.kda import KimiDeltaAttention


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


def test_kda_is_kimi_linears():
    mine = layer(KimiDeltaAttention, expand=0.8, norm_eps=1e-3, chunk=4)
    with keep_float64():
        config = KimiLinearConfig(
            hidden_size=E,
            linear_head_dim=mine.head_dim,
            linear_num_heads=H,
            rms_norm_eps=1e-3,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        )
        theirs = KimiLinearDeltaAttention(config, layer_idx=0)
    gates = theirs.forget_gate
    pairs = [
        Pair(mine.W_query.weight, theirs.q_proj.weight),
        Pair(mine.W_key.weight, theirs.k_proj.weight),
        Pair(mine.W_value.weight, theirs.v_proj.weight),
        Pair(mine.W_decay_down.weight, gates.f_a_proj.weight),
        Pair(mine.W_decay_up.weight, gates.f_b_proj.weight),
        Pair(mine.a_log_H, gates.A_log),
        Pair(mine.decay_bias_C, gates.dt_bias),
        Pair(mine.W_gate_down.weight, theirs.g_a_proj.weight),
        Pair(mine.W_gate_up.weight, theirs.g_b_proj.weight),
        Pair(mine.W_beta.weight, theirs.b_proj.weight),
        Pair(mine.conv.weight_C1K, theirs.conv1d.weight),
        Pair(mine.gain_V, theirs.o_norm.weight),
        Pair(mine.out_proj.weight, theirs.o_proj.weight),
    ]
    assert_agreement(mine, run(theirs), pairs)


@pytest.mark.parametrize("kind", [KimiDeltaAttention])
def test_a_token_at_a_time_is_the_full_pass(kind):
    mine = layer(kind, chunk=4)
    x = draw(B, T, E)
    assert_same(decode(mine, x, [1] * T), mine(x))
