"""An extended run has budgets of its own: it is never averaged with runs of one schedule."""

import shutil

import pytest
from interrupted import crash, once
from runfolders import write_run
from support import command, rows, summary

from gptattn.compare.finished_runs import read_runs
from gptattn.compare.table import load_comparison

LONGER = ("budget.steps=8", "validation.count=1")


@pytest.fixture
def extended(finished, tmp_path, monkeypatch):
    """A run of 6 steps that died once while it was extended to 8, and has them now."""
    with monkeypatch.context() as patch:
        once(patch, "training_step", 7, crash)
        assert command(tmp_path, "resume=run", *LONGER) == 1
    assert command(tmp_path, "resume=run", *LONGER) == 0
    return finished


def test_an_extended_run_is_one_of_both_budgets_in_this_order(extended):
    (run,) = read_runs([extended])[0]
    assert run.settings["budget"] == "6 steps, then 8 steps"
    assert run.provenance.budgets == ["6 steps"]
    assert summary(extended)["steps"] == 8
    progress = [row["progress/budget"] for row in rows(extended) if "val/loss" in row]
    assert progress[-2:] == [1.0, 1.0]


def test_a_run_that_left_its_schedule_says_where(stopped, tmp_path, capfd):
    shutil.copytree(stopped / "run", tmp_path / "run")
    assert command(tmp_path, "resume=run", "budget.steps=8") == 0
    assert "6 steps until step 3" in capfd.readouterr().err
    (run,) = read_runs([tmp_path / "run"])[0]
    assert run.settings["budget"] == "6 steps until step 3, then 8 steps"


def test_runs_extended_alike_are_compared_and_no_others(tmp_path):
    for variant, earlier, steps, loss in (
        ("mha", ["1000 steps"], 2000, 1.5),
        ("gqa", ["1000 steps"], 2000, 1.7),
        # One schedule of 2,000 steps, and the left one, are not what the other two had.
        ("mha", [], 2000, 1.4),
        ("mha", ["1000 steps until step 700"], 2000, 1.6),
        ("mha", [], 1000, 2.0),
    ):
        config = {"budget": {"steps": steps, "tokens": None, "default_steps": 1000}}
        made = {"earlier": [{"earlier budget": budget} for budget in earlier]}
        write_run(tmp_path / str(loss), variant, 1, loss, config=config, identity=made)
    sections = load_comparison(tmp_path).sections
    assert {section.title: [row.loss for row in section.rows] for section in sections} == {
        "1,000 steps, then 2,000 steps": [1.5, 1.7],
        "1,000 steps until step 700, then 2,000 steps": [1.6],
        "2,000 steps": [1.4],
        "1,000 steps": [2.0],
    }
