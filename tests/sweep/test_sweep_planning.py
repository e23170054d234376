"""A sweep's runs are planned quickly: common parts are composed and checked only once."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from support import command, tiny

import gptattn.cli.planning
import gptattn.sweep.checks
import gptattn.sweep.run_processes
import gptattn.sweep.sweep_progress
from gptattn.settings.compose import composed, composed_job, to_train_config
from gptattn.cli.main import check_job
from gptattn.cli.planning import planned
from gptattn.errors import ConfigError
from gptattn.settings.config import TrainConfig
from gptattn.sweep.checks import checked
from gptattn.sweep.plan import Plan
from gptattn.sweep.processes import Outcome, Work
from gptattn.sweep.sweep_progress import counted
from gptattn.training.precheck import Ready, check_run


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The jobs, as overrides, that Hydra has composed so far."""
    jobs = []

    def noted(loader: object, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
        jobs.append(list(overrides))
        return composed_job(loader, config, overrides)  # type: ignore[arg-type]

    monkeypatch.setattr(gptattn.cli.planning, "composed_job", noted)
    return jobs


def plans_of(jobs: Sequence[Sequence[str]], *shared: str) -> list[Plan]:
    """Return the plans of a sweep's jobs, in the jobs' order; `shared` are common overrides."""
    with composed(shared, run_mode=RunMode.MULTIRUN) as config:
        found = dict(planned(GlobalHydra.instance().config_loader(), config, jobs))
    return [found[i] for i in range(len(jobs))]


def alone(job: Sequence[str]) -> TrainConfig:
    """Return the settings that the job would have as a command of its own."""
    with composed(job) as cfg:
        return to_train_config(cfg)


def test_jobs_that_differ_in_values_share_a_composition_and_are_what_they_would_be_alone(
    compositions: list[list[str]],
) -> None:
    # Interpolations differ between jobs: the path with the seed, the prompt with the rate.
    own = ("data=text", "data.path=book_${seed}.txt", "sample.prompt=${data.path} ${optim.lr}")
    jobs = [
        [f"attn={attn}", f"seed={seed}", f"optim.lr={lr}", *own]
        for seed in (1, 2)
        for attn in ("mha", "gqa")
        for lr in ("1e-3", "2")
    ]
    plans = plans_of(jobs)
    assert len(compositions) == 2
    assert [plan.cfg for plan in plans] == [alone(job) for job in jobs]
    assert {plan.cfg.data["path"] for plan in plans} == {f"book_{i}.txt" for i in (1, 2)}
    assert [plan.overrides for plan in plans] == jobs
    names = [plan.folder.name for plan in plans]
    assert len(set(names)) == len(jobs)
    for job, name in zip(jobs, names, strict=True):
        variant, seed, lr = (override.partition("=")[2] for override in job[:3])
        path = f"data.path=book_{seed}.txt"
        assert name.startswith(f"{variant}_s{seed},optim.lr={lr},{path}_")


@pytest.mark.parametrize(
    "varied",
    [
        ["attn=mha", "attn=gqa"],  # a group
        ["attn=gqa attn.num_kv_heads=1", "attn=gqa attn.num_kv_heads=2"],  # a key of that choice
        ["sample={tokens:1} sample.tokens=2", "sample={tokens:1} sample.tokens=3"],  # touched twice
        ["++seed=1", "++seed=2"],
        ["tokenizer=char tokenizer.characters=a", "tokenizer=char tokenizer.characters=b"],
    ],
)
def test_what_is_more_than_a_value_is_composed_for_each_job(
    varied: list[str], compositions: list[list[str]]
) -> None:
    jobs = [each.split(" ") for each in varied]
    assert [plan.cfg for plan in plans_of(jobs)] == [alone(job) for job in jobs]
    assert len(compositions) == 2


def test_what_hydra_says_of_a_job_is_that_jobs_own(compositions: list[list[str]]) -> None:
    jobs = [[f"seed={seed}", "attn=gqa"] for seed in (1, 2, 1)]
    name = "hydra.sweep.subdir=${hydra.job.num}_${hydra.job.override_dirname}"
    plans = plans_of([[*job, name] for job in jobs])
    assert len(compositions) == 1
    assert [plan.folder.name for plan in plans] == [
        f"{i}_attn=gqa,seed={seed}" for i, seed in enumerate((1, 2, 1))
    ]
    assert [plan.overrides for plan in plans] == jobs
    # Two equal jobs are two runs.
    assert len({plan.folder for plan in plans_of(jobs)}) == 3


def test_a_wrong_value_in_any_job_is_told() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.subdir: '1/x' is not a folder name"):
        plans_of([["seed=1", "hydra.sweep.subdir=${seed}/x"]])
    with pytest.raises(ConfigError, match=r"batch_size: .*'wide'"):
        plans_of([["batch_size=4"], ["batch_size=wide"]])


def test_seeds_rates_and_budgets_are_checked_once_and_models_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = check_job(tiny(tmp_path))
    looked: list[int] = []

    real = check_run(cfg)

    def look(cfg: TrainConfig, original: TrainConfig | None) -> Ready:
        looked.append(cfg.model.d_model)
        return replace(real, cfg=replace(cfg, model=replace(cfg.model, d_mlp=77)))

    monkeypatch.setattr(gptattn.sweep.checks, "check_run", look)
    cfgs = [
        replace(
            cfg,
            seed=seed,
            optim=replace(cfg.optim, lr=lr),
            budget=replace(cfg.budget, steps=steps),
            model=replace(cfg.model, d_model=width),
        )
        for seed in (1, 2)
        for lr in (0.1, 0.2)
        for steps in (3, 4)
        for width in (16, 32)
    ]
    plans = checked([Plan([], cfg, tmp_path / str(i)) for i, cfg in enumerate(cfgs)])
    assert looked == [16, 32]
    expected = [replace(cfg, model=replace(cfg.model, d_mlp=77)) for cfg in cfgs]
    assert [plan.cfg for plan in plans] == expected


def test_slow_planning_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=80)
    with console.capture() as quick:
        assert list(counted("abc", 3, "planned", console)) == ["a", "b", "c"]
    monkeypatch.setattr(gptattn.sweep.sweep_progress, "LINE_SECONDS", -1.0)
    with console.capture() as slow:
        assert list(counted(range(2), 1000, "planned", console)) == [0, 1]
    assert quick.get() == ""
    assert slow.get().splitlines() == ["planned: 0 of 1,000", "planned: 1 of 1,000"]


def test_the_first_line_of_a_sweep_waits_for_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, gptattn.cli.main, gptattn.machine.console as console\n"
        "class First:\n"
        "    def print(self, line):\n"
        "        print(line, 'torch' in sys.modules)\n"
        "        raise SystemExit(0)\n"
        "console.make_console = First\n"
        "gptattn.cli.main.main()\n"
    )
    arguments = ["-m", "attn=mha,gqa", "seed=range(1,501)"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "planning 1,000 runs False\n"), ended.stderr


@pytest.mark.usefixtures("no_estimate")
def test_a_sweep_composes_its_jobs_once_and_runs_every_variant_of_a_seed_before_the_next_seed(
    tmp_path: Path,
    compositions: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run: list[str] = []

    def nothing(works: Sequence[Work], *args: object) -> list[Outcome]:
        run.extend(work.folder.name for work in works)
        return [Outcome(work.folder, 1, "not run", 0.0) for work in works]

    monkeypatch.setattr(gptattn.sweep.run_processes, "run_all", nothing)
    assert command(tmp_path, "-m", *tiny(tmp_path, "attn=mha,gqa", "seed=1,2,3")) == 1
    assert len(compositions) == 2
    named = [name.rpartition("_")[0] for name in run]
    assert named == [f"{attn}_s{seed}" for seed in "123" for attn in ("mha", "gqa")]
    assert capfd.readouterr().out.startswith("planning 6 runs\n")
