"""Tensor product attention by the paper's formulas in loops, and decoded from its factors."""

import math
from typing import Any

import pytest
import torch
from building import disturb, settings
from contract import assert_agree, draw
from torch import Tensor

from gptattn.attention.variants.tpa import TensorProductAttention
from gptattn.build.model import build_model
from gptattn.model.cost import count_parameters
from gptattn.position import HeadPosition, RotaryPosition

B, T, E, H, D = 2, 7, 5, 3, 10
RANKS = {"query_rank": 5, "key_rank": 2, "value_rank": 3}


def ours(position: HeadPosition | None = None, **changes: Any) -> TensorProductAttention:
    """A layer in float64, with noise on its weights."""
    mine = TensorProductAttention(E, H * D, T, H, position=position, **(RANKS | changes)).double()
    disturb(mine, std=0.3)
    return mine


def turned(x_D: Tensor, t: int) -> Tensor:
    """RoPE in complex numbers: pair i, the numbers i and i + D/2, turns by t * 10000^(-2i/D)."""
    pairs = torch.complex(x_D[: D // 2], x_D[D // 2 :])
    angle = t * 10_000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag])


def by_hand(mine: TensorProductAttention, x_TE: Tensor, rope: bool) -> Tensor:
    """The output [T, d_out]: every outer product, query, key and value on its own."""

    def made(x_E: Tensor, which: str) -> Tensor:
        rank = RANKS[f"{which}_rank"]
        a = mine.get_parameter(f"W_{which}_a.weight").view(rank, H, E)
        b = mine.get_parameter(f"W_{which}_b.weight").view(rank, D, E)
        return sum(torch.outer(a[r] @ x_E, b[r] @ x_E) for r in range(rank)) / rank

    q, k, v = ([made(x_E, which) for x_E in x_TE] for which in ("query", "key", "value"))
    rows = []
    for t in range(len(x_TE)):
        heads = []
        for h in range(H):
            scores = []
            for s in range(t + 1):
                q_D, k_D = (turned(q[t][h], t), turned(k[s][h], s)) if rope else (q[t][h], k[s][h])
                scores.append(q_D @ k_D / math.sqrt(D))
            w = torch.stack(scores).exp()
            heads.append(sum(w[s] * v[s][h] for s in range(t + 1)) / w.sum())
        rows.append(mine.out_proj.weight @ torch.cat(heads) + mine.out_proj.bias)
    return torch.stack(rows)


@pytest.mark.parametrize(("rope", "backend"), [(False, "reference"), (True, "sdpa")])
def test_outputs_and_gradients_are_those_of_the_papers_formulas(rope, backend):
    mine = ours(RotaryPosition(T, D) if rope else None, backend=backend)
    x = draw(B, T, E).requires_grad_()
    expected = torch.stack([by_hand(mine, row, rope) for row in x])
    assert_agree(mine(x), expected, [x, *mine.parameters()])


def test_at_gpt2_small_it_has_the_papers_sizes_in_parameters_and_cache():
    with torch.device("meta"):
        sizes = settings("model=gpt2_small", "attn=tpa", "position=rope")
        model = build_model(sizes, vocab_size=256).bfloat16()
    layer: Any = model.layers()[0].attention
    assert layer.ranks == (6, 2, 2)
    assert count_parameters(layer) == 1_173_504 + 768
    assert model.new_cache(batch=1).nbytes == 12 * 1024 * 608
    assert layer.new_cache(1, 1).nbytes == 608
    # Training: scores and sums, and the terms of queries, keys and values.
    assert layer.flops(100, 100) == 2 * 768 * 100 * 101 + 2 * 768 * (6 + 2 + 2) * 100
    # Decoding: the terms of the query, and 64 + 1 numbers per head and product of each key.
    assert layer.flops(1, 100) == 2 * 768 * 6 + 2 * 12 * (64 + 1) * 4 * 100


def test_factors_are_drawn_by_xaviers_rule_each_as_one_matrix():
    torch.manual_seed(0)
    mine = TensorProductAttention(256, 320, T, 5, **RANKS)
    with torch.no_grad():
        mine.initialise(0.02)
    for factor, size in (("a", 5), ("b", 64)):
        for which, rank in (("query", 5), ("key", 2), ("value", 3)):
            drawn = mine.get_parameter(f"W_{which}_{factor}.weight")
            bound = math.sqrt(6 / (256 + rank * size))
            assert 0.98 * bound < drawn.abs().max() <= bound
            assert drawn.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert mine.out_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
