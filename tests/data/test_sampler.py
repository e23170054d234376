"""Which tokens a batch holds, of training and of validation."""

import numpy as np
import pytest
import torch
from building import settings
from loading import load

from gptattn.data.sampler import ValidationSet, training_batch, window_starts
from gptattn.training.module import LanguageModel

TOKENS = (np.arange(1000) * 7 % 256).astype(np.uint16)


def test_every_window_is_drawn_equally_often_and_none_beyond_the_text():
    tokens = np.arange(9, dtype=np.uint16)
    ids, targets = training_batch(tokens, seed=0, step=0, batch_size=5000, context_length=4)
    # 1,000 of each are expected; the standard deviation is 28.
    assert ((ids[:, 0].bincount(minlength=5) - 1000).abs() < 6 * 28).all()
    assert targets.max() == 8
    assert ids.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, ids + 1)
    assert torch.equal(ids[:, 1:], ids[:, :-1] + 1)
    ids, targets = training_batch(tokens[:5], 0, 0, 2, context_length=4)  # the shortest text
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert targets.tolist() == [[1, 2, 3, 4]] * 2


def test_a_batch_depends_on_seed_and_step_alone():
    def batch(seed: int, step: int) -> list[list[int]]:
        return training_batch(TOKENS, seed, step, 4, 8)[0].tolist()

    before = [batch(1, step) for step in range(4)]
    np.random.seed(5)  # the global generators must have no effect
    torch.manual_seed(5)
    assert [batch(1, step) for step in (3, 2, 1, 0)] == before[::-1]
    assert len({str(batch(seed, step)) for seed in range(3) for step in range(3)}) == 9


@pytest.mark.parametrize("length", [2, 9, 10, 97])
@pytest.mark.parametrize(("batch_size", "context_length"), [(1, 1), (3, 4), (100, 8)])
def test_validation_scores_every_token_of_the_tail_once_and_in_order(
    length, batch_size, context_length
):
    tail = TOKENS[:length]
    batches = list(ValidationSet(tail, batch_size, context_length))
    ids, targets = (torch.cat([*map(torch.flatten, each)]) for each in zip(*batches, strict=True))
    assert ids.tolist() == tail[:-1].tolist()
    assert targets.tolist() == tail[1:].tolist()
    assert len(ValidationSet(tail, batch_size, context_length)) == len(batches)
    shapes = [tuple(ids.shape) for ids, _ in ValidationSet(TOKENS[:30], 2, 8)]
    assert shapes == [(2, 8), (1, 8), (1, 5)]


def test_validation_takes_the_rows_that_a_training_batch_takes_at_once(tmp_path):
    cfg = settings("seed=1", "batch_size=4", "accumulate=2", "model.context_length=8")
    module = LanguageModel(
        torch.nn.Identity(), cfg, load("x" * 1000, tmp_path), lambda step: 0.0, None
    )
    assert [len(ids) for ids, _ in module.val_dataloader()] == [2] * 6 + [1]


def test_even_windows_lie_about_equally_far_apart():
    first, second = (
        np.sort([window_starts(seed, step, 4, 10**6, even=True) for step in range(50)], axis=None)
        for seed in (1, 2)
    )
    for found in (first, second):
        gaps = np.diff(found, append=found[0] + 10**6) / 5000  # around the end
        # Of 200 random places, the largest gap is near 6, the smallest near 0.
        assert 0.4 < gaps.min() < gaps.max() < 2
        assert 0 <= found[0] < found[-1] < 10**6
    assert not {*first} & {*second}
