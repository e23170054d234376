"""experiment=zoology_fig2, its grid, and recall_window: their settings are those of the papers."""

from itertools import product
from typing import Any

import pytest
import yaml
from building import settings

from gptattn.settings.build import build_model
from gptattn.settings.compose import CONF
from gptattn.settings.config import TrainConfig
from gptattn.settings.construct import construct
from gptattn.sweep.jobs import words


def sweeper(experiment: str) -> dict[str, Any]:
    file = CONF / "experiment" / f"{experiment}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))["hydra"]["sweeper"]


def jobs(experiment: str) -> list[TrainConfig]:
    """The settings of every run of the experiment's sweep, but for its seeds and rates."""
    found = sweeper(experiment)
    values = [
        [f"{key}={value.strip()}" for value in str(given).split(",")]
        for key, given in found["params"].items()
    ]
    entries = [words(entry) for entry in found.get("variants", [""])]
    return [
        settings(f"experiment={experiment}", *entry, *own)
        for entry in entries
        for own in product(*values)
    ]


EXPERIMENTS = ("zoology_fig2", "zoology_fig2_grid", "recall_window")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_each_run_has_two_layers_of_one_head_without_an_mlp_and_rows_that_fit(
    experiment: str,
) -> None:
    found = jobs(experiment)
    for cfg in found:
        assert (cfg.choices["data"], cfg.choices["position"]) == ("recall", "learned")
        construct("data", cfg.data, {}, []).check(cfg.model.context_length)
        assert (cfg.model.num_layers, cfg.model.num_heads) == (2, 1)
    blocks = build_model(found[0], found[0].data["vocab_size"]).layers()
    assert [block.mlp for block in blocks] == [None, None]


def test_the_grid_is_that_of_the_paper_with_64_epochs_of_its_rows() -> None:
    found = jobs("zoology_fig2_grid")
    cells = {(cfg.model.d_model, cfg.model.context_length, cfg.data["pairs"]) for cfg in found}
    pairs = {64: 4, 128: 8, 256: 16, 512: 64}
    assert cells == {(d, T, k) for d in (64, 128, 256, 512) for T, k in pairs.items()}
    assert {cfg.data["vocab_size"] for cfg in found} == {8192}
    assert {cfg.batch_size * (cfg.budget.steps or 0) for cfg in found} == {64 * 100_000}
    assert sweeper("zoology_fig2_grid")["tune"]["lr"] == [1.0e-4, 4.6e-4, 2.2e-3, 1.0e-2]


def test_the_windows_go_from_few_ids_to_the_whole_row() -> None:
    found = jobs("recall_window")
    assert [cfg.attn["window"] for cfg in found] == [4, 8, 16, 32, 64]
    assert {cfg.model.context_length for cfg in found} == {64}
