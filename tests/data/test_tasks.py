"""Synthetic tasks: each row can be solved by hand from what it holds, and only so."""

import numpy as np
import pytest
from loading import request
from scipy.stats import chisquare
from support import refuses

from gptattn.data.tasks import (
    IGNORED,
    Copy,
    Induction,
    Recall,
    SelectiveCopy,
    Task,
    TaskData,
    draw_different,
    task_rows,
)
from gptattn.data.tokenizer import TaskIds

TASKS = [Recall(64, pairs=5), Copy(), Induction(), SelectiveCopy(tokens=6)]


def answers(task: Task, ids: list[int]) -> list[int]:
    """Solve one row in plain Python: the targets, from the ids alone."""
    found = [IGNORED] * len(ids)
    if isinstance(task, Recall):
        told = dict(zip(ids[0 : 2 * task.pairs : 2], ids[1 : 2 * task.pairs : 2], strict=True))
        for place in range(2 * task.pairs, len(ids), 2):
            found[place] = told.get(ids[place], IGNORED)
    elif isinstance(task, Copy):
        middle = ids.index(0)
        found[middle : 2 * middle] = ids[:middle]
    elif isinstance(task, Induction):
        found[-1] = ids[ids.index(0) + 1]
    elif isinstance(task, SelectiveCopy):
        found[ids.index(1) :] = [i for i in ids if i > 1]
    return found


@pytest.mark.parametrize("length", [47, 48])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_every_row_is_solved_by_the_rule_of_its_task(task, length):
    ids, targets = task_rows(task, 1, 7, 200, length)
    assert ids.shape == targets.shape == (200, length)
    assert 0 <= ids.min() <= ids.max() < task.vocab_size
    for row, expected in zip(ids.tolist(), targets.tolist(), strict=True):
        solved = answers(task, row)
        scored = [i for i, target in enumerate(expected) if target != IGNORED]
        assert scored
        # A filler of `Recall` may be a key by chance; it is not scored.
        assert [solved[i] for i in scored] == [expected[i] for i in scored]
    # They are a function of seed and step.
    assert np.array_equal(task_rows(task, 1, 7, 200, length), [ids, targets])
    for seed, step in ((1, 8), (2, 7)):
        assert not np.array_equal(task_rows(task, seed, step, 200, length)[0], ids)


def test_recall_asks_for_each_key_once_and_mostly_near_the_pairs():
    task = Recall(64, pairs=4)
    ids, targets = task_rows(task, 1, 1, rows=2_000, length=64)
    assert ((targets != IGNORED).sum(axis=1) == 4).all()
    keys = np.sort(ids[:, 0:8:2], axis=1)
    asked = np.sort(ids[targets != IGNORED].reshape(-1, 4), axis=1)
    assert np.array_equal(keys, asked)
    assert (np.diff(keys, axis=1) > 0).all()
    assert 1 <= keys.min() <= keys.max() < 32 <= targets.max() < 64
    gaps = (np.nonzero(targets != IGNORED)[1] - 8) // 2
    # The law p ~ gap ** -0.99 puts about half of its weight on the first seven of 28 places.
    assert 0.55 < (gaps < 7).mean() < 0.75
    ids, targets = task_rows(Recall(64, pairs=4, blanks=True), 1, 1, rows=100, length=32)
    assert set(ids[:, 8:][targets[:, 8:] == IGNORED].tolist()) == {0}


def test_numbers_are_drawn_by_their_weights_without_one_twice():
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    drawn = draw_different(np.random.default_rng(0), 8_000, 4, 2, weights)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    first = np.bincount(drawn[:, 0], minlength=4)
    assert chisquare(first, 8_000 * weights / weights.sum()).pvalue > 0.001
    # After number 0, the others are drawn in the proportion of what is left: 2, 1, 1.
    second = np.bincount(drawn[drawn[:, 0] == 0, 1], minlength=4)[1:]
    assert chisquare(second, second.sum() * np.array([0.5, 0.25, 0.25])).pvalue > 0.001


@pytest.mark.parametrize("count", [2, 3])  # of five: drawn again if twice; the first to end
def test_numbers_without_weights_are_drawn_evenly_in_every_order(count):
    drawn = draw_different(np.random.default_rng(0), 12_000, 5, count)
    found = np.unique(drawn, axis=0, return_counts=True)[1]
    assert len(found) == (20 if count == 2 else 60)
    assert chisquare(found).pvalue > 0.001


@pytest.mark.parametrize(
    ("task", "least"),
    [(Recall(pairs=9), 36), (Induction(val_rows=9), 3), (SelectiveCopy(tokens=17), 34)],
)
def test_a_context_too_short_for_a_row_is_refused(task, least, tmp_path):
    task.load(request(tmp_path, TaskIds(), context_length=least))
    with refuses(f"model.context_length: {least} ids"):
        task.load(request(tmp_path, TaskIds(), context_length=least - 1))


def test_too_few_ids_for_a_row_of_several_answers_are_refused():
    with pytest.raises(ValueError, match=r"^vocab_size=16.* 18"):
        Recall(16, pairs=8)
    with pytest.raises(ValueError, match=r"^vocab_size=3.* 4"):
        SelectiveCopy(3)
    assert Recall(power=0) == Recall(power=0.0)  # what Hydra makes of data.power=0


def test_no_row_that_is_validated_on_is_trained_on():
    # The page's example: 8 ** 4 rows, of which random ones are held out in one of five cases.
    data = TaskData(Copy(9), 8, TaskIds())
    held_out = {tuple(row) for ids, _ in data.validation(100, 8) for row in ids.tolist()}
    assert 800 < len(held_out) <= 1000
    drawn, _ = task_rows(data.task, 1, 5, 1000, 8)
    assert sum(tuple(row) in held_out for row in drawn.tolist()) > 100
    ids, targets = data.training_batch(1, 5, 1000, 8)
    assert not any(tuple(row) in held_out for row in ids.tolist())
    assert (ids.numpy() == drawn).all(axis=1).mean() > 0.7  # the others are as they were drawn
    assert (targets[:, 4:] == ids[:, :4]).all()
    with refuses("data.val_rows: 1000 of 1000"):
        TaskData(Copy(3), 4, TaskIds())  # four rows in all
