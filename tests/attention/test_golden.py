"""The numbers printed by the tutorials this project grew from (golden.json), to 4 decimals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptattn.attention import (
    CausalAttention,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    Rule,
    SelfAttentionV1,
    SelfAttentionV2,
    attention_weights,
)

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
INPUTS = torch.tensor(GOLDEN["inputs_6x3"])
BATCH = torch.stack([INPUTS, INPUTS])
BACKENDS = pytest.mark.parametrize("backend", ["reference", "sdpa"])


def case(name: str) -> dict[str, Any]:
    (found,) = [case for case in GOLDEN["cases"] if case["name"] == name]
    return found


def assert_printed(actual: Tensor, expected: list[Any]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=6e-5)


def test_self_attention_gives_the_printed_numbers_in_both_forms():
    expected = case("self-attention, linear layers, not causal")["output"]
    torch.manual_seed(123)
    v2 = SelfAttentionV2(d_in=3, d_out=2)
    v1 = SelfAttentionV1(d_in=3, d_out=2)
    v1.load_state_dict({name.partition(".")[0]: w.T for name, w in v2.state_dict().items()})
    assert_printed(v2(INPUTS), expected)
    assert_printed(v2(BATCH), [expected, expected])
    assert_printed(v1(INPUTS), expected)


@BACKENDS
def test_the_wrapper_gives_the_printed_numbers(backend):
    expected = case("wrapper, two heads of width 2 side by side, no output projection")["output"]
    sizes = {"d_in": 3, "d_out": 4, "context_length": 6, "num_heads": 2}
    torch.manual_seed(123)
    wrapper = MultiHeadAttentionWrapper(**sizes, out_proj=False, backend=backend)
    assert_printed(wrapper(BATCH), [expected, expected])


@BACKENDS
def test_split_attention_gives_the_printed_numbers(backend):
    expected = case("split multi-head attention, two heads of width 1")
    torch.manual_seed(123)
    attention = MultiHeadAttention(d_in=3, d_out=2, context_length=6, num_heads=2, backend=backend)
    assert_printed(attention(BATCH), 2 * [expected["output"]])
    with torch.no_grad():
        attention.W_query.weight.neg_()  # as in the tutorial that negates its scores
    assert_printed(attention(BATCH), 2 * [expected["output_with_query_weight_negated"]])


@BACKENDS
def test_the_single_causal_head_gives_the_printed_numbers(backend):
    torch.manual_seed(123)
    x = torch.randn(2, 5, 4)
    head = CausalAttention(d_in=4, d_out=4, context_length=5, backend=backend)
    assert_printed(head(x), case("single causal head")["output"])


def test_mask_and_softmax_give_the_printed_weights():
    # The printed scores are scaled already: the weights are their softmax with scale 1. Against
    # keys that are the rows of the identity, a query is its own row of scores.
    printed = case("causal mask and softmax")
    queries, keys = torch.tensor(printed["scores"]), torch.eye(6)
    weights = attention_weights(queries[None, None], keys[None, None], Rule(1.0))
    assert_printed(weights[0, 0], printed["weights"])
    assert weights.triu(1).count_nonzero() == 0
