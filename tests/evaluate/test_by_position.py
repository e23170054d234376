"""Loss by position: the bins by hand, and losses against logits in plain loops."""

import math

import numpy as np
import pytest
import torch
from building import build_gpt

from gptattn.evaluate.losses import compare_tokens, list_edges, measure_by_position
from gptattn.runs.evaluation import Bin, LengthLoss

TOKENS = np.random.default_rng(0).integers(0, 13, size=41).astype(np.uint16)


@pytest.mark.parametrize(
    ("length", "trained", "expected"),
    [
        (1, 1, [1]),
        (11, 5, [1, 2, 3, 4, 5, 6, 8, 11]),
        (40, 100, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]),
        (200, 128, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 200]),
    ],
)
def test_bins_end_twice_in_each_doubling_and_at_the_trained_length(length, trained, expected):
    assert list_edges(length, trained) == expected


@pytest.mark.parametrize("length", [11, 1])
@torch.no_grad()
def test_each_bin_is_the_mean_over_its_positions_in_all_whole_windows(length):
    model = build_gpt("attn=gqa", "position=rope", "attn.num_kv_heads=2", "model.d_model=48").eval()
    found = measure_by_position(model, TOKENS, length, trained=5)
    windows = 40 // length
    assert found.windows == windows
    by_window = []
    for start in range(0, windows * length, length):
        ids = torch.from_numpy(TOKENS[start : start + length + 1].astype(np.int64))
        probability = model(ids[None, :-1])[0].double().softmax(-1)
        by_window.append([-math.log(probability[t, ids[t + 1]]) for t in range(length)])
    by_context = np.mean(by_window, axis=0)
    for one in found.bins:
        assert one.loss == pytest.approx(by_context[one.first - 1 : one.last].mean(), abs=1e-5)
    assert [one.first for one in found.bins[1:]] == [one.last + 1 for one in found.bins[:-1]]
    assert (found.bins[0].first, found.bins[-1].last) == (1, length)
    assert found.loss == pytest.approx(by_context.mean(), abs=1e-5)


def test_the_mean_between_two_contexts_counts_positions():
    found = LengthLoss(1, 0.0, [Bin(1, 1, 5.0), Bin(2, 2, 4.0), Bin(3, 4, 1.0), Bin(5, 8, 2.0)])
    assert found.between(1, 4) == (5 + 4 + 1 + 1) / 4
    assert found.between(5, 8) == 2.0


@torch.no_grad()
def test_losses_in_pieces_are_those_of_all_logits(monkeypatch):
    model = build_gpt("attn=mha").eval()
    ids = torch.arange(22).view(2, 11) % 13
    targets = (ids * 5 + 1) % 13
    expected = torch.nn.functional.cross_entropy(model(ids).mT.double(), targets, reduction="none")
    monkeypatch.setattr("gptattn.evaluate.losses.LOGITS_AT_A_TIME", 13 * 4)
    found, _ = compare_tokens(model, model.hidden(ids), targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
