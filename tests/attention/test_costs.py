"""Parameters, cache and FLOPs of a layer of GPT-2 small, against the papers' and docs' formulas."""

from typing import Any

import pytest
import torch
from building import build_attention

from gptattn.attention.recurrence import count_flops
from gptattn.model.cost import count_parameters
from gptattn.position import RotaryPosition

E, H, D = 768, 12, 64
SIZES = {"d_in": E, "d_out": E, "context_length": 1024, "num_heads": H, "qkv_bias": False}
ROPE = {"position": RotaryPosition(1024, D)}
MHA, MQA = 2_360_064, 1_278_720
# 1 + 2 + 3 pairs in each head: a multiply-add for the score, and one for the sum.
PAIRS = {(3, 3): 6 * E * 2 * 2}
PAPERS = {"expand_k": 0.75, "expand_v": 1.5, "out_bias": False}
N = 128  # of a state of Mamba-2
RWKV7_CACHE = 0, H * D * D * 4 + 2 * E
LATER = {"layer": 1, "num_layers": 2, "provided": ["rwkv7_values"]}
# Variant, arguments, parameters, bytes of a cache in bfloat16 (for each token, and besides), and
# FLOPs of (queries, keys).
COSTS: list[tuple[str, dict[str, Any], int, tuple[int, int], dict[tuple[int, int], int]]] = [
    # Two bytes a number: 2 (keys and values) * heads * 64 * 2.
    ("mha_wrapper", {"out_proj": False}, 1_769_472, (3072, 0), PAIRS),
    ("mha_wrapper", {}, MHA, (3072, 0), PAIRS),
    ("mha", {}, MHA, (3072, 0), PAIRS),
    # 1 + ... + 7 + 7 pairs; then 7 for a token that decodes.
    ("sliding", {"window": 7}, 1_377_024, (512, 0), {(8, 8): 35 * 4 * E, (1, 9): 7 * 4 * E}),
    ("gqa", {"num_kv_heads": 4}, 1_573_632, (1024, 0), PAIRS),
    ("mqa", {}, MQA, (256, 0), PAIRS),
    # A layer that reuses keys and values has none of its own.
    ("cross_layer", {"layer": 0}, MQA, (256, 0), PAIRS),
    ("cross_layer", {"layer": 1}, MQA - 2 * E * D, (0, 0), PAIRS),
    # Four vectors of lambda, and the norm's gain.
    ("differential", {}, MHA + 4 * D + 2 * D, (3072, 0), PAIRS),
    ("differential", {"num_kv_heads": 4}, 1_573_632 + 4 * D + 2 * D, (1024, 0), {}),
    (
        "mla",
        ROPE,
        2_187_264 + (256 + 512) + E,
        (2 * (256 + 32), 0),
        # 96 numbers of a pair for the score, 64 for the sum. Decoding: a whole entry each.
        {(100, 100): 2 * H * (96 + D) * 5050, (1, 100): 2 * H * (288 + 288) * 100},
    ),
    # Without rotary positions the 32 columns of keys, and of each query, are not there.
    ("mla", {}, 2_187_264 + (256 + 512) + E - 32 * E - 512 * H * 32, (2 * 256, 0), {}),
    (
        "tpa",
        ROPE,
        1_173_504 + E,
        (608, 0),
        # Scores and sums, and the terms of queries, keys and values, of ranks 6, 2 and 2. Decoding:
        # the terms of the query, and 64 + 1 numbers per head and product of each key.
        {
            (100, 100): 2 * E * 100 * 101 + 2 * E * (6 + 2 + 2) * 100,
            (1, 100): 2 * E * 6 + 2 * H * (D + 1) * 4 * 100,
        },
    ),
    (
        "nsa",
        {},
        2 * E * E + E + 2 * E * 3 * 2 * D + E * 3 * H + 2 * (8 * D + 8 * D * D + D * D),
        (2 * 512, 9 * 512),  # all tokens and a window's; seven of a block, and two entries
        {(1, 1000): 2 * (E * (3 * 249 + 2 * (64 + 128)) + 4 * 9 * D * D // 4)},
    ),
    # States are in float32; beside them inputs of convolutions.
    (
        "gated_deltanet",
        {},
        5 * E * E + 2 * E * H + 3 * E * 4 + 2 * H + D + E,
        (0, H * D * D * 4 + 3 * 3 * E * 2),
        {(1, 1000): 7 * H * D * D},
    ),
    (
        "gated_deltanet",
        PAPERS,
        6 * E * E + 2 * E * H + 3 * E * 4 + 2 * H + 96,
        (0, H * 48 * 96 * 4 + 3 * 3 * E * 2),
        {(100, 100): count_flops(100, 32, H, 48, 96, delta=True)},
    ),
    (
        "kda",
        {},
        4 * E * E + 4 * E * D + E * H + 3 * E * 4 + E + H + D + E,
        (0, H * D * D * 4 + 3 * 3 * E * 2),
        {(1, 1000): 7 * H * D * D},
    ),
    ("lightning", {}, 5 * E * E + 2 * E, (0, H * D * D * 4), {(1, 1000): 5 * H * D * D}),
    (
        "short_conv",
        {},
        4 * E * E + 3 * E + E,
        (0, 2 * E * 2),
        # Three multiply-adds of the convolution; two gates.
        {(100, 100): 8 * E * 100, (1, 100): 8 * E},
    ),
    (
        "mamba2",
        {},
        6 * E * E + 2 * E * (N + H) + (2 * E + 2 * N) * 5 + 6 * H + 2 * E + E,
        (0, 2 * H * N * D * 4 + 3 * (2 * E + 2 * N) * 2),
        {(1, 1000): 5 * 2 * H * N * D},
    ),
    # Adapters of ranks 64, 64 and 128 and 13 small ones; the state and the last token.
    ("rwkv7", {}, 4 * E * E + 2 * E * 256 + 14 * E, RWKV7_CACHE, {(1, 1000): 9 * H * D * D}),
    ("rwkv7", LATER, 4 * E * E + 2 * E * 288 + 15 * E, RWKV7_CACHE, {}),
]


@pytest.mark.parametrize(("variant", "arguments", "params", "cache", "flops"), COSTS)
def test_a_layer_costs_what_the_formulas_say(variant, arguments, params, cache, flops):
    with torch.device("meta"):
        layer = build_attention(variant, **SIZES | arguments).bfloat16()
    assert count_parameters(layer) == params
    per_token, besides = cache
    for tokens in (1, 7):
        assert layer.new_cache(1, tokens).nbytes == besides + per_token * tokens
    assert {of: layer.flops(*of) for of in flops} == flops
