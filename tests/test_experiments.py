"""conf/experiment: every run of every experiment composes; the tasks' grid is the paper's."""

from itertools import product
from typing import Any

import pytest
import yaml
from building import menu, settings

from gptattn.settings.compose import CONF
from gptattn.settings.config import TrainConfig
from gptattn.sweep.jobs import split_overrides


def sweeper(experiment: str) -> dict[str, Any]:
    file = CONF / "experiment" / f"{experiment}.yaml"
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found.get("hydra", {}).get("sweeper", {})


def jobs(experiment: str) -> list[TrainConfig]:
    """The settings of every run of the experiment's sweep, but for its seeds and rates."""
    found = sweeper(experiment)
    values = [
        [f"{key}={value.strip()}" for value in str(given).split(",")]
        for key, given in found.get("params", {}).items()
        if key != "seed"
    ]
    entries = [split_overrides(entry) for entry in found.get("variants", [""])]
    return [
        settings(f"experiment={experiment}", *entry, *own)
        for entry in entries
        for own in product(*values)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", menu("experiment"))
def test_every_run_of_an_experiment_composes_and_no_two_are_the_same(experiment):
    found = jobs(experiment)
    assert len({repr(cfg) for cfg in found}) == len(found)


def test_one_experiment_has_every_distinct_recipe_with_a_matched_mlp():
    recipes = sweeper("recipes")["params"]["recipe"].split(",")
    # At four heads qwen3_5 is the same model as qwen3_next.
    assert sorted([*recipes, "mamba2", "qwen3_5"]) == menu("recipe")
