"""A sweep that first finds each variant's learning rate, and its list of variants."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from support import command, run_folders, summary, tiny

import gptattn.training.train
from gptattn.settings.compose import CONF, composed
from gptattn.cli.main import check_job
from gptattn.cli.planning import planned
from gptattn.cli.sweep_jobs import words
from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import read_runs
from gptattn.errors import ConfigError
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_config
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.identity import settings_key
from gptattn.sweep.plan import Found, Plan
from gptattn.sweep.stages import Stages
from gptattn.sweep.tuning import Tune, TuneStage, at_rates, rate_words, tune_of
from gptattn.training.precheck import Ready

RATES = (0.001, 0.002, 0.004)


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path / "in"))


# What is asked for


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": None}, r"tune\.lr: is missing"),
        ({"lr": []}, r"tune\.lr: \[\] is not a list"),
        ({"lr": 0.1}, r"tune\.lr: 0\.1 is not a list"),
        ({"lr": [0.1, 0]}, r"tune\.lr: 0 is not a positive number"),
        ({"lr": [math.nan]}, r"tune\.lr: nan is not a positive number"),
        ({"lr": ["fast"]}, r"tune\.lr: 'fast' is not a positive number"),
        ({"lr": [1, 1.0]}, r"tune\.lr: .* has a rate twice"),
        ({"seed": True}, r"tune\.seed: True is not a seed"),
        ({"seed": -1}, r"tune\.seed: -1 is not a seed"),
        ({"rates": [1]}, r"tune key: 'rates' is unknown"),
    ],
)
def test_rates_that_cannot_be_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tune_of({"lr": [0.1, 0.2], "seed": 0, **change})


def test_each_variant_is_tuned_once_at_each_rate_and_may_then_run_at_any() -> None:
    jobs = [["attn=mha", "seed=1"], ["attn=mha", "seed=2"]]
    first, second = at_rates(tune_of({"lr": [0.2, 0.1], "seed": 7}), jobs)
    assert first == [["attn=mha", "seed=7", f"optim.lr={lr}"] for lr in (0.1, 0.2)]
    assert second == [[*job, f"optim.lr={lr}"] for job in jobs for lr in (0.1, 0.2)]


def test_each_variant_has_a_rate_for_each_optimizer() -> None:
    jobs = [["attn=mha", f"optim={name}", "seed=1"] for name in ("adamw", "muon")]
    first, _ = at_rates(tune_of({"lr": [0.1, 0.2], "seed": 7}), jobs)
    assert first == [
        ["attn=mha", f"optim={name}", "seed=7", f"optim.lr={lr}"]
        for name in ("adamw", "muon")
        for lr in (0.1, 0.2)
    ]


def test_experiment_optimizers_has_each_variant_under_both_at_every_rate() -> None:
    text = (CONF / "experiment" / "optimizers.yaml").read_text(encoding="utf-8")
    sweeper = yaml.safe_load(text)["hydra"]["sweeper"]
    jobs = [
        [*words(variant), f"optim={optim}", "experiment=optimizers", "seed=1"]
        for variant in sweeper["variants"]
        for optim in sweeper["params"]["optim"].split(",")
    ]
    tune = tune_of(sweeper["tune"])
    first, _ = at_rates(replace(tune, lr=tune.lr[:1]), jobs)
    with composed([], run_mode=RunMode.MULTIRUN) as config:
        plans = dict(planned(GlobalHydra.instance().config_loader(), config, first))
    found = [plans[i].cfg for i in range(len(jobs))]
    for cfg in found:
        check(cfg)
    assert len({settings_key(asdict(cfg)) for cfg in found}) == 2 * len(sweeper["variants"])
    assert {cfg.optim.lr for cfg in found} == {tune.lr[0]}
    assert [cfg.optim.matrices is None for cfg in found] == [True, False] * len(sweeper["variants"])
    assert str(tune.seed) not in sweeper["params"]["seed"].split(",")


def test_words_part_at_spaces_outside_quotes_and_brackets() -> None:
    assert words(" a=1  part=[gate, sink] 'b=x y' c={d: 1} e=\"(\" f=2 ") == [
        "a=1",
        "part=[gate, sink]",
        "'b=x y'",
        "c={d: 1}",
        'e="("',
        "f=2",
    ]


# Which rate is best


def test_the_words_on_rates_name_the_best_and_say_where_it_is_at_the_edge() -> None:
    inside = rate_words({0.004: 1.7, 0.001: 1.6, 0.002: 1.5})
    assert inside == "0.002 is best (0.001: 1.6000, 0.002: 1.5000, 0.004: 1.7000)"
    low = rate_words({0.001: 1.6, 0.002: math.inf})
    assert low == (
        "0.001 is best (0.001: 1.6000, 0.002: diverged), the lowest that was tried: "
        "a better one may lie below"
    )
    assert rate_words({0.001: 2.0, 0.002: 1.5}).endswith(
        "the highest that was tried: a better one may lie above"
    )
    assert rate_words({0.1: 1.0}) == "0.1 is best (0.1: 1.0000)"


def stages(
    folder: Path, cfg: TrainConfig, losses: Sequence[float | None], diverged: Sequence[int] = ()
) -> tuple[TuneStage, Stages]:
    """Return the stage of one variant whose tuning runs ended with these losses."""

    def plan(name: str, lr: float, seed: int) -> Plan:
        own = replace(cfg, seed=seed, optim=replace(cfg.optim, lr=lr))
        return Plan(["attn=mha", f"seed={seed}", f"optim.lr={lr}"], own, folder / name)

    first = [plan(f"tune_{lr}", lr, 0) for lr in RATES]
    for one, loss in zip(first, losses, strict=True):
        if loss is not None:
            one.folder.mkdir(parents=True)
            text = json.dumps({"status": "done", "metrics": {"val/loss": loss}})
            (one.folder / "summary.json").write_text(text)
    candidates = [plan(f"s{seed}_{lr}", lr, seed) for seed in (1, 2) for lr in RATES]
    lost = {first[i].folder for i in diverged}
    return TuneStage(Tune(RATES, 0), candidates), Stages(Found({}, {}), first, candidates, [], lost)


@pytest.mark.parametrize(
    ("losses", "diverged", "best"),
    [
        ([1.7, 1.5, 1.6], [], 0.002),
        ([1.5, 1.5, 1.6], [], 0.001),  # of equals the lowest
        ([1.7, None, None], [1, 2], 0.001),
        ([9.9, 9.8, None], [2], 0.002),
    ],
)
def test_the_seeds_run_at_the_rate_with_the_lowest_loss(
    losses: list[float | None], diverged: list[int], best: float, cfg: TrainConfig, tmp_path: Path
) -> None:
    stage, known = stages(tmp_path / "out", cfg, losses, diverged)
    chosen = stage.chosen(known)
    assert [(p.cfg.seed, p.cfg.optim.lr) for p in chosen.plans] == [(1, best), (2, best)]
    assert stage.expected(known) == chosen.plans
    assert chosen.skipped == {}


@pytest.mark.parametrize(
    ("losses", "diverged", "reason"),
    [
        ([1.7, None, 1.6], [], r"its learning rate is not known: tune_0\.002 is not done"),
        ([None, None, None], [0, 1, 2], "it diverged at every learning rate"),
    ],
)
def test_a_variant_without_a_best_rate_is_skipped(
    losses: list[float | None], diverged: list[int], reason: str, cfg: TrainConfig, tmp_path: Path
) -> None:
    stage, known = stages(tmp_path / "out", cfg, losses, diverged)
    known.second = stage.expected(known)
    assert [(p.cfg.seed, p.cfg.optim.lr) for p in known.second] == [(1, 0.001), (2, 0.001)]
    chosen = stage.chosen(known)
    assert chosen.plans == []
    assert set(chosen.skipped.values()) == {reason.replace("\\", "")}
    assert list(chosen.skipped) == [p.folder for p in known.second]


# From the command line, in this process


def arguments(
    folder: Path, *more: str, variants: str = '["attn=mha","attn=mqa part=[sink]"]'
) -> list[str]:
    own = ["hydra/launcher=basic", "budget.steps=2", "sample.tokens=0", "validation.count=1"]
    sweep = [f"hydra.sweeper.variants={variants}", "hydra.sweeper.tune={lr:[1e-3,2e-3],seed:0}"]
    return ["-m", *tiny(folder, *own, *sweep, "checkpoint=false", "experiment_name=a", *more)]


def test_each_variant_runs_at_its_best_rate_and_the_same_command_does_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gptattn.training.train.train_ready

    def failing(ready: Ready, *args: Any, **named: Any) -> dict[str, Any]:
        if (ready.cfg.variant, ready.cfg.optim.lr) == ("mqa+sink", 0.001) and broken:
            raise AssertionError("not the run's fault")
        return real(ready, *args, **named)

    monkeypatch.setattr(gptattn.training.train, "train_ready", failing)
    rates = "hydra.sweeper.tune.lr=[1e-3,1e30]"
    # A rate that was not tried to the end leaves its variant for another time.
    broken = True
    assert command(tmp_path, *arguments(tmp_path, "seed=1,2", rates)) == 1
    out, err = capfd.readouterr()
    assert "stage 2 of 2  each variant at its best learning rate" in out
    assert "attn=mha 0.001 is best (0.001: " in out
    assert "1e+30: diverged), the lowest that was tried" in out
    said = "1 of 8 runs failed, and 2 whose learning rate is not known yet were skipped"
    assert err.splitlines()[-1] == f"error: sweep: {said}; the same command runs them again"
    broken = False
    assert command(tmp_path, *arguments(tmp_path, "seed=1,2", rates)) == 0
    assert "8 runs, 5 already done" in capfd.readouterr().out
    home = tmp_path / "outputs" / "a"
    made = {(r.parent.name, summary(r)["variant"], summary(r)["seed"]) for r in run_folders(home)}
    assert made == {
        *(("a", variant, seed) for variant in ("mha", "mqa+sink") for seed in (1, 2)),
        *(("tuning", variant, 0) for variant in ("mha", "mqa+sink")),
    }
    assert {load_config(run).optim.lr for run in run_folders(home)} == {0.001}
    assert len(run_folders(home)) == 6
    assert command(tmp_path, *arguments(tmp_path, "seed=1,2", rates)) == 0
    assert "nothing to do" in capfd.readouterr().out


@pytest.mark.slow
def test_results_at_a_rate_that_is_no_longer_the_best_are_no_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "outputs" / "a"

    def rates_after(*rates: float) -> tuple[set[tuple[int, str]], str]:
        own = [*arguments(tmp_path, "seed=1,2", variants='["attn=mha"]')]
        assert command(tmp_path, *own, f"hydra.sweeper.tune.lr={list(rates)}") == 0
        runs, passed_over = read_runs([home])
        said = "replaced: its variant has a better learning rate now"
        assert sum(said in line for line in passed_over) == len(list(home.glob("*/replaced.txt")))
        (section,) = compare(runs).sections
        assert [row.name for row in section.rows] == ["mha"]
        return {(run.seed, run.settings["optim.lr"]) for run in runs}, capfd.readouterr().out

    assert rates_after(0.001)[0] == {(1, "0.001"), (2, "0.001")}
    # One at a rate that no tuning run has is the user's own.
    own = replace(load_config(run_folders(home)[0]), seed=3)
    other = replace(own, optim=replace(own.optim, lr=0.5))
    (home / "mine").mkdir()
    RunFolder(home / "mine").write_settings(other)
    (home / "mine" / "summary.json").write_text("{}")
    found, out = rates_after(0.001, 0.01)
    assert found == {(1, "0.01"), (2, "0.01")}
    assert "replaced: 2 runs at a learning rate that is no longer the best; reports leave" in out
    assert (next(home.glob("*/replaced.txt"))).read_text() == (
        "learning rate 0.01 is better than 0.001\n"
    )
    assert not (home / "mine" / "replaced.txt").exists()
    # Back to the first rates: nothing is trained again.
    found, out = rates_after(0.001)
    assert found == {(1, "0.001"), (2, "0.001")}
    assert "nothing to do" in out
    assert "replaced: 2 runs" in out


def test_variants_that_diverge_at_every_rate_end_the_sweep_with_that(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = arguments(tmp_path, "seed=1,2", "hydra.sweeper.tune.lr=[1e29,1e30]")
    for _ in range(2):
        assert command(tmp_path, *own) == 5
        out, err = capfd.readouterr()
        assert "skipped: 4 runs: it diverged at every learning rate" in out
        said = "2 variants diverged at every learning rate; give lower rates"
        assert err.splitlines()[-1] == f"error: sweep: {said}"
    assert run_folders(tmp_path) == []


@pytest.mark.usefixtures("no_estimate")
def test_an_entry_that_is_anothers_default_counts_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    both = '["attn=mha","attn=mha position=rope"]'
    place = ["hydra.sweeper.tune=null", "block=gpt2,llama", "sweep.minutes=1e-9"]
    own = [*arguments(tmp_path, *place, variants=both), "hydra/launcher=processes"]
    own.remove("hydra/launcher=basic")
    assert command(tmp_path, *own) == 0
    out, err = capfd.readouterr()
    assert "sweep  3 runs, in outputs/a" in out
    # The time was over before the first run began.
    assert err == "1e-09 minutes are over: 0 of 3 runs are done; the same command goes on\n"
    assert run_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("variants", "more", "said"),
    [
        ('["attn=gqaa"]', [], "error: attn: 'gqaa' is unknown"),
        ('["attn=mha part=[gate"]', [], "error: hydra.sweeper.variants: 'attn=mha part=[gate' "),
        (
            '["attn=mha"]',
            ["attn=gqa"],
            "error: attn: is also in hydra.sweeper.variants, 'attn=mha'",
        ),
        ('["attn=gqa attn.num_kv_heads=3"]', [], "error: attn.num_kv_heads: "),
        (
            '["attn=mha hydra.run.dir=x"]',
            [],
            "error: hydra.sweeper.variants: 'attn=mha hydra.run.dir=x' sets hydra.run.dir, ",
        ),
        (
            '["attn=mha +hydra/launcher=basic"]',
            [],
            "error: hydra.sweeper.variants: 'attn=mha +hydra/launcher=basic' sets hydra/launcher, ",
        ),
        ("[]", [], "error: hydra.sweeper.variants: is not a list of overrides"),
        ("[[a]]", [], "error: hydra.sweeper.variants: is not a list of overrides"),
        ('["attn=mha"]', ["optim.lr=1"], "error: optim.lr: has no place beside"),
        ('["attn=mha"]', ["seed=0,1"], "error: hydra.sweeper.tune.seed: 0 is one of the seeds"),
        ('["attn=mha"]', ["hydra.sweeper.tune.lr=[]"], "error: hydra.sweeper.tune.lr: "),
        ('["attn=mha"]', ["sweep.minutes=3"], "error: sweep.minutes: 3 needs launcher=processes"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    variants: str, more: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *arguments(tmp_path, *more, variants=variants)) == 2
    err = capfd.readouterr().err
    assert err.startswith(said)
    assert len(err.splitlines()) == 1
    if "gqa" in variants:
        assert f"in hydra.sweeper.variants: {json.loads(variants)[0]}" in err
    assert not (tmp_path / "outputs").exists()
