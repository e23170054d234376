"""A sweep states before its first run what its seeds can show."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from runfolders import write_run
from scipy.stats import t
from support import tiny

from gptattn.settings.compose import CONF
from gptattn.cli.main import check_job
from gptattn.compare.statistics import smallest_difference
from gptattn.settings.config import TrainConfig
from gptattn.sweep.design import TYPICAL_DEVIATION, design_words
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import Plan
from gptattn.sweep.run_sweep import run_sweep


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return check_job(tiny(tmp_path_factory.mktemp("in")))


def plans(cfg: TrainConfig, variants: Sequence[str], seeds: Sequence[int]) -> list[Plan]:
    return [
        Plan([], replace(cfg, seed=seed, choices=cfg.choices | {"attn": variant}), Path(variant))
        for variant in variants
        for seed in seeds
    ]


def said(cfg: TrainConfig, folder: Path, variants: Sequence[str], seeds: Sequence[int]) -> str:
    (line,) = design_words(plans(cfg, variants, seeds), folder)
    return line


def finished(folder: Path, cfg: TrainConfig, losses: dict[str, Sequence[float]]) -> None:
    for variant, values in losses.items():
        for seed, loss in enumerate(values, start=1):
            own = replace(cfg, seed=seed, choices=cfg.choices | {"attn": variant})
            write_run(folder / f"{variant}{seed}", variant, seed, loss, config=asdict(own))


def test_the_design_says_the_difference_that_four_of_five_such_sweeps_show(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    line = said(cfg, tmp_path / "x" / "y", ["mha", "gqa", "mqa", "sw"], range(5))
    assert line == (
        "5 seeds, 3 comparisons: differences of about 0.065 nats or more would be shown with 80% "
        "power, if losses vary over seeds as at model=tiny after 1,000 steps (standard deviation "
        "0.02 nats)"
    )
    # Simulate 10,000 sweeps of a variant and the baseline, whose runs at one seed are independent.
    runs = np.random.default_rng(0).normal(scale=TYPICAL_DEVIATION, size=(2, 10_000, 5))
    d = runs[1] + 0.065 - runs[0]
    values = d.mean(axis=1) / d.std(axis=1, ddof=1) * math.sqrt(5)
    assert (np.abs(values) > t.isf(0.025 / 3, 4)).mean() == pytest.approx(0.8, abs=0.02)


def test_finished_runs_of_this_size_say_how_much_losses_vary(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    sweep = tmp_path / "outputs" / "new"
    beside = tmp_path / "outputs" / "old"
    finished(beside, cfg, {"mha": [2.0, 2.1, 2.2], "gqa": [2.0, 2.2, 2.4]})
    # By hand: deviations 0.1 and 0.2, two degrees of freedom each: sqrt(0.05 / 2) = 0.158.
    line = said(cfg, sweep, ["mha", "gqa"], range(5))
    assert line.endswith("judging by 6 finished runs like these (standard deviation 0.16 nats)")
    # 0.158 / 0.02 times 0.048, the difference that is shown at the typical deviation.
    assert line.startswith("5 seeds, 1 comparison: differences of about 0.38 nats or more")
    other = replace(cfg, model=replace(cfg.model, num_layers=2))
    assert "as at model=tiny" in said(other, sweep, ["mha", "gqa"], range(5))
    longer = replace(cfg, budget=replace(cfg.budget, steps=5))
    assert "as at model=tiny" in said(longer, sweep, ["mha", "gqa"], range(5))


def test_damaged_runs_beside_the_sweep_are_no_hindrance(cfg: TrainConfig, tmp_path: Path) -> None:
    finished(tmp_path / "old", cfg, {"mha": [2.0, 2.1, 2.2]})
    for file in (tmp_path / "old").glob("*/summary.json"):
        file.write_text("{")
    (tmp_path / "old" / "mha1" / "summary.json").unlink()
    (tmp_path / "old" / "mha1" / "summary.json").symlink_to("nowhere")
    assert "as at model=tiny" in said(cfg, tmp_path / "new", ["mha", "gqa"], range(3))


def test_one_seed_is_said_to_show_nothing_and_one_variant_to_be_compared_with_nothing(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    line = said(cfg, tmp_path / "x", ["mha", "gqa"], [1])
    assert line.startswith(
        "1 seed, 1 comparison: no difference can be shown, however large; seed=1,2,3,4,5 would "
        "show those of about 0.048 nats or more with 80% power, "
    )
    assert said(cfg, tmp_path / "x", ["mha"], range(5)) == "one variant: nothing to compare"


def test_runs_that_cannot_be_compared_are_no_comparisons(cfg: TrainConfig, tmp_path: Path) -> None:
    longer = replace(cfg, budget=replace(cfg.budget, steps=9))
    both = [*plans(cfg, ["mha", "gqa"], [1, 2]), *plans(longer, ["mha", "gqa", "mqa"], [1, 2])]
    assert [line.split(":")[0] for line in design_words(both, tmp_path)] == [
        "2 seeds, 1 comparison",
        "2 seeds, 2 comparisons",
    ]
    # Two sets with the same design give one line.
    both = [*plans(cfg, ["mha", "gqa"], [1, 2]), *plans(longer, ["mha", "gqa"], [1, 2])]
    assert len(design_words(both, tmp_path)) == 1


def test_each_optimizer_with_several_variants_has_a_design_of_its_own(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    muon = replace(cfg, optim=replace(cfg.optim, matrices={"_target_": "gptattn.optim.Muon"}))
    both = [*plans(cfg, ["mha", "gqa"], [1, 2]), *plans(muon, ["mha", "gqa", "mqa"], [1, 2])]
    assert [line.split(":")[0] for line in design_words(both, tmp_path)] == [
        "2 seeds, 1 comparison",
        "2 seeds, 2 comparisons",
    ]
    # With one variant the optimizers are what is compared.
    both = [*plans(cfg, ["mha"], [1, 2]), *plans(muon, ["mha"], [1, 2])]
    assert design_words(both, tmp_path)[0].startswith("2 seeds, 1 comparison: ")


def test_a_sweep_says_its_design_before_its_first_run(
    cfg: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def launch(todo: Sequence[Plan]) -> Sequence[Any]:
        print("the first run")
        raise KeyboardInterrupt

    wanted = [replace(cfg, seed=seed, batch_size=n) for seed in (1, 2) for n in (2, 4)]
    todo = [Plan([], each, tmp_path / f"{i}") for i, each in enumerate(wanted)]
    with pytest.raises(KeyboardInterrupt):
        run_sweep(todo, Ledger(tmp_path), launch, in_processes=False)
    shown = capfd.readouterr().out
    assert shown.index("one variant: nothing to compare") < shown.index("the first run")


def test_the_classic_suite_has_seeds_enough_for_a_verdict() -> None:
    suite = yaml.safe_load((CONF / "experiment" / "attention_suite.yaml").read_text())
    params = suite["hydra"]["sweeper"]["params"]
    variants, seeds = params["attn"].split(","), str(params["seed"]).split(",")
    paired = math.sqrt(2) * TYPICAL_DEVIATION
    assert smallest_difference(paired, len(seeds), len(variants) - 1) < 0.07
