"""Entropy and sink mass, against values worked by hand."""

import math

import pytest
import torch

from gptattn.maps.head_statistics import measure_heads

# Two heads on three tokens. Head 0: the second query has two equal weights, the third all weight on
# itself. Head 1: a quarter and three quarters; then a third each.
BY_HAND = torch.tensor(
    [
        [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]],
        [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [1 / 3, 1 / 3, 1 / 3]],
    ],
    dtype=torch.float64,
)[None]


def test_entropy_and_sink_mass_of_a_case_worked_by_hand():
    entropy_H, sink_H = measure_heads(BY_HAND)
    # -(1/4 ln 1/4 + 3/4 ln 3/4) = ln 4 - 3/4 ln 3
    expected = [math.log(2) / 2, (math.log(4) - 0.75 * math.log(3) + math.log(3)) / 2]
    assert entropy_H.tolist() == pytest.approx(expected, rel=1e-12)
    assert sink_H.tolist() == pytest.approx([0.25, (1 / 4 + 1 / 3) / 2], rel=1e-12)


def test_even_weights_have_the_logarithm_of_what_is_seen():
    ones = torch.ones(1, 1, 4, 4, dtype=torch.float64).tril()
    entropy_H, sink_H = measure_heads(ones / ones.sum(-1, keepdim=True))
    assert entropy_H.item() == pytest.approx(math.log(2 * 3 * 4) / 3, rel=1e-12)
    assert sink_H.item() == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, rel=1e-12)


def test_half_precision_is_summed_in_float32():
    # In bfloat16 a sum of 1,000 such terms stops growing long before its end.
    entropy_H, _ = measure_heads(torch.full((1, 1, 2, 1024), 2.0**-10, dtype=torch.bfloat16))
    assert entropy_H.item() == pytest.approx(math.log(1024), rel=1e-5)


def test_one_token_alone_has_neither():
    assert all(value_H.isnan().all() for value_H in measure_heads(torch.ones(2, 3, 1, 1)))
