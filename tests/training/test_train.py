"""A run is reproducible, treats all variants alike, and stops when its budget is used up."""

import numpy as np
import pytest
from support import config, losses, series, summary, train

from gptattn.runs.folder import RunFolder


def test_a_seed_repeats_a_run_and_another_does_not(runs, tmp_path):
    same = train(tmp_path / "same", "attn=gqa", "model.num_layers=2")
    other = train(tmp_path / "other", "attn=gqa", "model.num_layers=2", "seed=0")
    assert losses(same) == losses(runs("gqa"))
    assert series(same, "sample/text") == series(runs("gqa"), "sample/text")
    assert not {*losses(same)} & {*losses(other)}


def test_what_is_measured_or_kept_does_not_change_the_losses(runs, tmp_path):
    quiet = ("checkpoint=false", "sample.tokens=0", "validation.count=1")
    run = train(tmp_path, "attn=gqa", "model.num_layers=2", *quiet)
    assert series(run, "train/loss") == series(runs("gqa"), "train/loss")
    assert series(run, "val/loss") == series(runs("gqa"), "val/loss")[-1:]
    assert not (run / "checkpoints").exists()
    assert series(run, "sample/text") == []


def test_accumulation_changes_no_loss(runs, tmp_path):
    split = train(tmp_path, "attn=gqa", "model.num_layers=2", "accumulate=2")
    for name in ("train/loss", "val/loss", "train/grad_norm"):
        whole = dict(series(runs("gqa"), name))
        assert dict(series(split, name)) == pytest.approx(whole, abs=1e-5)


def test_a_row_holds_the_mean_loss_of_its_steps(runs, tmp_path):
    some = train(tmp_path, "attn=gqa", "model.num_layers=2", "validation.count=1", "log_every=3")
    single = [value for _, value in series(runs("gqa"), "train/loss")]
    means = {1: single[0], 3: np.mean(single[1:3]), 4: single[3]}
    assert dict(series(some, "train/loss")) == pytest.approx(means, abs=1e-6)


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ("budget.steps=null budget.tokens=65", 2),
        ("budget.steps=7 validation.count=5 accumulate=2", 7),
    ],
)
def test_a_run_takes_the_steps_of_its_budget_and_validates_at_its_end(budget, steps, tmp_path):
    run = train(tmp_path, *budget.split(" "))
    assert summary(run)["steps"] == steps
    assert series(run, "train/loss")[-1][0] == steps
    validated = [step for step, _ in series(run, "val/loss")]
    assert validated[-1] == steps
    assert len(validated) == len(set(validated))
    assert len(validated) <= config(run)["validation"]["count"]
    assert RunFolder(run).known_checkpoints()[0].name == f"step={steps}.safetensors"


def test_a_budget_of_seconds_ends_with_the_step_that_uses_it_up(tmp_path):
    run = train(tmp_path, "budget.steps=null", "budget.seconds=0.3")
    taken = dict(series(run, "progress/seconds"))
    *_, before, last = taken
    assert taken[before] < 0.3 <= taken[last]
    assert taken[last] == pytest.approx(sum(dict(series(run, "perf/step_ms")[:-1]).values()) / 1e3)
    assert (summary(run)["steps"], summary(run)["budget"]) == (last, "0.3 seconds")
    assert series(run, "val/loss")[-1][0] == last


def test_the_learning_rate_follows_the_budget_of_steps(tmp_path):
    run = train(tmp_path, "budget.steps=4", "optim.lr=0.1", "optim.warmup_fraction=0.5")
    # The steps are taken at progress 1/4, 2/4, 3/4 and 4/4: half-way up, at the peak, half-way down
    # to a tenth of it, and at that tenth.
    expected = {1: 0.05, 2: 0.1, 3: 0.055, 4: 0.01}
    assert dict(series(run, "train/lr")) == pytest.approx(expected)
