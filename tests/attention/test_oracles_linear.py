"""The mechanisms that keep a state against transformers' classes with the same weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from building import disturb
from contract import assert_same, decode, draw
from hugging import (
    B,
    E,
    H,
    T,
    assert_agreement,
    keep_float64,
    pairs_of_kda,
    pairs_of_lightning,
    pairs_of_mamba2,
)
from torch import Tensor, nn
from transformers import KimiLinearConfig, Mamba2Config, MiniMaxConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from gptattn.attention import Attention, Shared
from gptattn.attention.variants.kda import KimiDeltaAttention
from gptattn.attention.variants.lightning import LightningAttention
from gptattn.attention.variants.mamba2 import Mamba2


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
    pairs = pairs_of_kda(mine, theirs)
    assert_agreement(mine, run(theirs), pairs)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_transformers(groups):
    mine = layer(Mamba2, state_size=7, groups=groups, head_dim=5, norm_eps=1e-3, chunk=4)
    with keep_float64():
        config = Mamba2Config(
            hidden_size=E,
            num_heads=mine.heads,
            head_dim=5,
            state_size=7,
            n_groups=groups,
            layer_norm_epsilon=1e-3,
            chunk_size=8,
            num_hidden_layers=1,
        )
        theirs = Mamba2Mixer(config, layer_idx=0)
    pairs = pairs_of_mamba2(mine, theirs)
    assert_agreement(mine, run(theirs), pairs)


@pytest.mark.parametrize("number", [0, 2, 3])
def test_lightning_is_minimaxs(number):
    mine = layer(LightningAttention, expand=0.8, layer=number, num_layers=4, chunk=4)
    with keep_float64():
        config = MiniMaxConfig(
            hidden_size=E,
            num_attention_heads=H,
            num_key_value_heads=H,
            head_dim=mine.head_dim,
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 4,
            block_size=8,
        )
        theirs = MiniMaxLightningAttention(config, layer_idx=number)
    pairs = pairs_of_lightning(mine, theirs)
    given = {"position_embeddings": None, "attention_mask": None}
    assert_agreement(mine, run(theirs, **given), pairs)


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
