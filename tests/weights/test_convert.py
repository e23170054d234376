"""Conversions are exact where possible, and otherwise follow the paper's methods."""

import pytest
import torch
from building import build_gpt
from support import refuses
from torch import nn

from gptattn.attention.base import HeadWeights
from gptattn.model.gpt import GPT
from gptattn.weights.convert import convert, convert_heads


def gpt(attn: str, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return build_gpt(*attn.split(" "), "model.d_model=24", std=0.1).double().eval()


@torch.no_grad()
def apart(a: GPT, b: GPT) -> float:
    ids = torch.randint(13, (2, a.context_length))
    return (a(ids) - b(ids)).abs().max().item()


LLAMA = "block=llama block.tied_head=false model.qkv_bias=false"
EXACT = [
    ("attn=mha part=[qk_norm,gate]", "attn=mha_wrapper part=[qk_norm,gate]"),
    ("attn=gqa attn.num_kv_heads=6", "attn=mha"),
    ("attn=gqa attn.num_kv_heads=1", "attn=mqa"),
    # Each key/value head is copied to all heads of its group.
    ("attn=mqa", "attn=mha"),
    ("attn=gqa", "attn=mha_wrapper"),
    (f"attn=mqa {LLAMA}", f"attn=gqa attn.num_kv_heads=3 {LLAMA}"),
]


@pytest.mark.parametrize(("source", "target"), EXACT)
def test_an_exact_conversion_changes_no_logit(source, target):
    old, new = gpt(source, 1), gpt(target, 2)
    assert apart(old, new) > 0.1
    convert(old, new)
    assert apart(old, new) < 1e-12


def weights(kv: list[list[float]]) -> HeadWeights:
    """Four query heads and these key/value heads; head size 1, model width 2."""
    k = torch.tensor(kv, dtype=torch.float64).unsqueeze(1)
    q = torch.zeros(4, 1, 2, dtype=torch.float64)
    return HeadWeights(q, k, 10 * k, None, k[:, :, 0], None, None, None)


OLD = [[1.0, 2.0], [3.0, 6.0], [10.0, 0.0], [20.0, 8.0]]


@pytest.mark.parametrize(
    ("method", "count", "expected"),
    [
        ("mean", 2, [[2.0, 4.0], [15.0, 4.0]]),
        ("first", 2, [[1.0, 2.0], [10.0, 0.0]]),
        ("mean", 1, [[8.5, 4.0]]),
        ("mean", 4, OLD),
    ],
)
def test_merged_heads_are_the_mean_or_the_first_of_their_group(method, count, expected):
    new = convert_heads(weights(OLD), count, method, torch.Generator())
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(new.k_GDE[:, 0], expected)
    torch.testing.assert_close(new.v_GDE[:, 0], 10 * expected)
    torch.testing.assert_close(new.k_bias_GD[:, 0], expected[:, 0])
    assert new.v_bias_GD is None


def test_the_random_method_draws_gpt2s_spread_and_no_bias():
    wide = HeadWeights(
        *(torch.ones(4, 50, 100) for _ in range(3)), *3 * [torch.ones(4, 50)], None, None
    )
    new = convert_heads(wide, 2, "random", torch.Generator().manual_seed(3))
    assert new.k_GDE.shape == (2, 50, 100)
    assert new.k_GDE.std().item() == pytest.approx(0.02, rel=0.05)
    assert not new.k_bias_GD.any()
    again = convert_heads(wide, 2, "random", torch.Generator().manual_seed(3))
    assert torch.equal(again.v_GDE, new.v_GDE)


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("attn=mha", f"attn=mha {LLAMA}", "differs"),
        ("attn=mha block.tied_head=false", "attn=mha", "lm_head.weight"),
        ("attn=mha", "attn=mha model.num_heads=2", "heads of shape"),
        ("attn=mha", "attn=mha model.qkv_bias=false", "bias"),
        ("attn=gqa attn.num_kv_heads=2", "attn=gqa attn.num_kv_heads=3", "divide"),
    ],
)
def test_a_pair_that_cannot_be_converted_says_why(source, target, said):
    with refuses(f"*: {said}"):
        convert(gpt(source), gpt(target))


@pytest.mark.parametrize("variant", ["mha", "mha_wrapper"])
def test_a_weight_beside_the_heads_that_the_target_lacks_is_named(variant):
    source = gpt(f"attn={variant}")
    linear = next(m for m in source.layers()[1].attention.modules() if isinstance(m, nn.Linear))
    linear.register_parameter("lora_A", nn.Parameter(torch.ones(1)))
    with refuses("*: W_query.lora_A"):
        convert(source, gpt("attn=gqa"))
