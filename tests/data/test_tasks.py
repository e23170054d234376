"""Synthetic tasks: each row can be solved by hand from what it holds, and only so."""

from itertools import permutations

import numpy as np
import pytest
from loading import request
from scipy.stats import chisquare
from support import refuses

from gptattn.data.sampler import make_generator
from gptattn.data.tasks import (
    IGNORED,
    Copy,
    Induction,
    NoisyRecall,
    Recall,
    SelectiveCopy,
    Task,
    TaskData,
    draw_different,
)
from gptattn.data.tokenizer import TaskIds
from gptattn.data.tracking import Permutations

SWAPS = Permutations(group="s5", generators="transpositions")
TASKS = [
    *(Recall(64, pairs=5), Copy(), Induction(), SelectiveCopy(tokens=6)),
    *(Permutations(group="s2"), Permutations(), Permutations(group="s5"), SWAPS),
    *(Recall(64, pairs=(3, 11)), NoisyRecall(21, noise_vocab_size=8)),
]


def answers(task: Task, ids: list[int]) -> list[int]:
    """Solve one row in plain Python: the targets, from the ids alone."""
    found = [IGNORED] * len(ids)
    if isinstance(task, Recall) and isinstance(task.pairs, int):
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
    elif isinstance(task, Permutations):
        elements = sorted(permutations(range(int(task.group[1]))))
        where = elements[0]  # each point is by now
        for place, element in enumerate(ids):
            where = tuple(elements[element][point] for point in where)
            found[place] = elements.index(where)
    else:  # what followed the key first, at a place of keys
        for place in range(0, len(ids), 2):
            found[place] = [*ids, IGNORED][2 * ids[::2].index(ids[place]) + 1]
    return found


@pytest.mark.parametrize("length", [47, 48])
@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_every_row_is_solved_by_the_rule_of_its_task(task, length):
    drawn = task.draw(make_generator(1, 7), 200, length)
    ids, targets, *_ = drawn
    assert ids.shape == targets.shape == (200, length)
    assert 0 <= ids.min() <= ids.max() < task.vocab_size
    for row, expected in zip(ids.tolist(), targets.tolist(), strict=True):
        solved = answers(task, row)
        scored = [i for i, target in enumerate(expected) if target != IGNORED]
        assert scored
        # A filler of `Recall` may be a key by chance; it is not scored.
        assert [solved[i] for i in scored] == [expected[i] for i in scored]
    # They are a function of seed and step.
    assert np.array_equal(task.draw(make_generator(1, 7), 200, length), drawn)
    for seed, step in ((1, 8), (2, 7)):
        assert not np.array_equal(task.draw(make_generator(seed, step), 200, length)[0], ids)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_a_constant_guess_is_right_at_the_stated_chance(task):
    make_generator = [task.draw_held_out(np.random.default_rng(seed), 4_000, 48) for seed in (1, 2)]
    (_, seen, *_), (_, targets, *labels) = make_generator
    guess = np.bincount(seen[seen != IGNORED]).argmax()
    for label in range(max(1, len(task.slices()))):
        of_slice = targets != IGNORED
        if labels:
            of_slice &= labels[0] == label
        right = (targets[of_slice] == guess).mean()
        spread = (task.chance() / len(targets)) ** 0.5  # of rows, if all answers in one are equal
        assert abs(right - task.chance()) < 4 * spread


def test_states_are_scored_at_each_id_in_training_and_held_out_at_the_last():
    data = TaskData(Permutations(group="s2"), 24, TaskIds())
    ids, targets = data.training_batch(1, 0, 8, 24)
    assert (targets == ids.cumsum(1) % 2).all()
    assert data.scored == 1.0
    for length in (24, 48):
        ((ids, targets),) = data.validation(1000, length)
        assert ids.shape == (1000, length)
        assert (targets[:, :-1] == IGNORED).all()
        assert (targets[:, -1] == ids.sum(1) % 2).all()
    assert data.facts()["val_tokens"] == 1000


def test_rows_of_permutations_are_those_worked_by_hand():
    # 021, 102, 120 (which takes 0 to 1, 1 to 2 and 2 to 0), and 021 again.
    assert answers(Permutations(), [1, 2, 3, 1]) == [1, 3, 4, 2]  # 021, 120, 201, 102
    ids, _ = SWAPS.draw(make_generator(1, 0), 500, 20)
    elements = sorted(permutations(range(5)))
    moved = {i: sum(a != b for a, b in enumerate(elements[i])) for i in set(ids.flatten().tolist())}
    assert sorted(moved.values()) == [0] + [2] * 10


def test_rows_of_mixed_recall_have_the_pairs_of_their_label():
    task = Recall(64, pairs=(3, 11))
    assert task.slices() == ("pairs_3", "pairs_11")
    _, targets, labels = task.draw(make_generator(1, 0), 400, 48)
    assert (labels == labels[:, :1]).all()
    assert 140 < labels[:, 0].sum() < 260
    assert ((targets != IGNORED).sum(1) == np.array([3, 11])[labels[:, 0]]).all()
    data = TaskData(task, 48, TaskIds())
    assert data.slices == task.slices()
    assert all(len(batch) == 3 for batch in data.validation(64, 48))
    assert len(data.training_batch(1, 0, 8, 48)) == 2
    assert data.scored == pytest.approx(7 / 48, abs=0.01)
    assert data.opening(48, 96)[1] is None


def test_a_key_among_noise_asks_once_it_was_seen():
    task = NoisyRecall(21, noise_vocab_size=8, noise=0.5)  # six keys, seven values
    ids, targets = task.draw(make_generator(1, 0), 300, 30)
    assert 0.4 < (ids[:, :-2:2] >= 13).mean() < 0.5  # one pair at least is none
    assert ((ids[:, ::2] >= 13) == (ids[:, 1::2] >= 13)).all()
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        seen = [row[place] < 6 and row[place] in row[:place:2] for place in range(0, 30, 2)]
        assert [target != IGNORED for target in wanted] == [
            asked for again in seen for asked in (again, False)
        ]
        assert seen[-1]


def test_recall_asks_for_each_key_once_and_mostly_near_the_pairs():
    task = Recall(64, pairs=4)
    ids, targets = task.draw(make_generator(1, 1), rows=2_000, length=64)
    assert ((targets != IGNORED).sum(axis=1) == 4).all()
    keys = np.sort(ids[:, 0:8:2], axis=1)
    asked = np.sort(ids[targets != IGNORED].reshape(-1, 4), axis=1)
    assert np.array_equal(keys, asked)
    assert (np.diff(keys, axis=1) > 0).all()
    assert 1 <= keys.min() <= keys.max() < 32 <= targets.max() < 64
    gaps = (np.nonzero(targets != IGNORED)[1] - 8) // 2
    # The law p ~ gap ** -0.99 puts about half of its weight on the first seven of 28 places.
    assert 0.55 < (gaps < 7).mean() < 0.75
    ids, targets = Recall(64, pairs=4, blanks=True).draw(make_generator(1, 1), rows=100, length=32)
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
    [
        *((Recall(pairs=9), 36), (Induction(val_rows=9), 3), (SelectiveCopy(tokens=17), 34)),
        *((Recall(pairs=(32, 4)), 128), (NoisyRecall(val_rows=9), 3)),
    ],
)
def test_a_context_too_short_for_a_row_is_refused(task, least, tmp_path):
    task.load(request(tmp_path, TaskIds(), context_length=least))
    with refuses(f"model.context_length: {least} ids"):
        task.load(request(tmp_path, TaskIds(), context_length=least - 1))
    with refuses(f"validation.lengths: {least} ids"):
        TaskData(task, least, TaskIds()).validation(9, least - 1)


def test_too_few_ids_for_a_row_of_several_answers_are_refused():
    with pytest.raises(ValueError, match=r"^vocab_size=16.* 18"):
        Recall(16, pairs=8)
    with pytest.raises(ValueError, match=r"^vocab_size=3.* 4"):
        SelectiveCopy(3)
    with pytest.raises(ValueError, match=r"^vocab_size=65.* 66"):
        Recall(65, pairs=(4, 32))
    with pytest.raises(ValueError, match=r"^vocab_size=18.* 19"):
        NoisyRecall(18)
    assert Recall(power=0) == Recall(power=0.0)  # what Hydra makes of data.power=0


def test_no_row_that_is_validated_on_is_trained_on():
    # The page's example: 8 ** 4 rows, of which random ones are held out in one of five cases.
    data = TaskData(Copy(9), 8, TaskIds())
    held_out = {tuple(row) for ids, _ in data.validation(100, 8) for row in ids.tolist()}
    assert 800 < len(held_out) <= 1000
    drawn, _ = data.task.draw(make_generator(1, 5), 1000, 8)
    assert sum(tuple(row) in held_out for row in drawn.tolist()) > 100
    ids, targets = data.training_batch(1, 5, 1000, 8)
    assert not any(tuple(row) in held_out for row in ids.tolist())
    assert (ids.numpy() == drawn).all(axis=1).mean() > 0.7  # the others are as they were drawn
    assert (targets[:, 4:] == ids[:, :4]).all()
    with refuses("data.val_rows: 1000 of 1000"):
        TaskData(Copy(3), 4, TaskIds())  # four rows in all
