"""Tensor product attention by the paper's formulas in loops, and how its factors start."""

import math

import pytest
import torch
from building import disturb
from contract import assert_agree, draw
from torch import Tensor

from gptattn.attention.variants.tpa import TensorProductAttention
from gptattn.position import RotaryPosition

B, T, E, H, D = 2, 7, 5, 3, 10
RANKS = {"query_rank": 5, "key_rank": 2, "value_rank": 3}


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
    position = RotaryPosition(T, D) if rope else None
    mine = TensorProductAttention(E, H * D, T, H, position=position, backend=backend, **RANKS)
    disturb(mine.double(), std=0.3)
    x = draw(B, T, E).requires_grad_()
    expected = torch.stack([by_hand(mine, row, rope) for row in x])
    assert_agree(mine(x), expected, [x, *mine.parameters()])


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
