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
def test_every_run_of_an_experiment_composes_and_no_two_are_the_same(experiment: str) -> None:
    found = jobs(experiment)
    assert len({repr(cfg) for cfg in found}) == len(found)


def test_one_experiment_has_every_recipe_with_an_mlp_to_match_and_a_model_of_its_own() -> None:
    recipes = sweeper("recipes")["params"]["recipe"].split(",")
    # At four heads qwen3_5 is the same model as qwen3_next.
    assert sorted([*recipes, "mamba2", "qwen3_5"]) == menu("recipe")


@pytest.mark.slow
def test_the_grid_is_that_of_the_paper_with_64_epochs_of_its_rows() -> None:
    found = jobs("zoology_fig2_grid")
    cells = {(cfg.model.d_model, cfg.model.context_length, cfg.data["pairs"]) for cfg in found}
    pairs = {64: 4, 128: 8, 256: 16, 512: 64}
    assert cells == {(d, T, k) for d in (64, 128, 256, 512) for T, k in pairs.items()}
    assert {cfg.data["vocab_size"] for cfg in found} == {8192}
    assert {cfg.batch_size * (cfg.budget.steps or 0) for cfg in found} == {64 * 100_000}
    assert sweeper("zoology_fig2_grid")["tune"]["lr"] == [1.0e-4, 4.6e-4, 2.2e-3, 1.0e-2]
