"""Which runs of a sweep are done or resumed, and how many run at once."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from support import tiny

from gptattn.cli.jobs import worker_command
from gptattn.cli.main import check_job
from gptattn.cli.resume_settings import resume_argument
from gptattn.runs.folder import RunFolder
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import Making, settings_key, went_on
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import (
    Found,
    Plan,
    finished_runs,
    folders_done,
    with_resumable_folders,
)

# What is done


MAKING = Making("text", "cpu", {"gptattn.attention.mha": "a"})


def finished(folder: Path, cfg: TrainConfig, status: str = "done") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(cfg)))
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    RunFolder(folder).write_making(MAKING)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step=2.safetensors").touch()
    return folder


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path / "in", "optim.lr=1e-05"))


def test_a_run_is_done_where_a_finished_one_has_its_settings(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    other = replace(cfg, seed=2)
    done = finished(tmp_path / "out" / "a", cfg)
    plans = [
        Plan([], c, tmp_path / "out" / name, making=MAKING)
        for c, name in ((cfg, "x"), (other, "y"))
    ]
    assert folders_done(plans) == Found({plans[0].folder: done}, {})


def test_a_run_that_was_extended_is_done_as_what_its_first_budget_made(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    longer = replace(cfg, budget=replace(cfg.budget, steps=9))
    done = finished(tmp_path / "out" / "a", longer)
    ends = [{"budget": asdict(c.budget), "step": c.budget.steps} for c in (cfg, longer)]
    (done / "summary.json").write_text(
        json.dumps({"status": "done", "steps": 9, "completed": ends})
    )
    # Other code made the steps after the first budget.
    RunFolder(done).write_making(went_on(MAKING, replace(MAKING, code={}), cfg.budget.steps or 0))
    plans = [
        Plan([], c, tmp_path / "out" / name, making=MAKING)
        for c, name in ((cfg, "x"), (longer, "y"))  # `longer` in a single schedule was not run
    ]
    assert folders_done(plans) == Found({plans[0].folder: done}, {})
    assert folders_done(plans, with_weights=True) == Found({}, {})


def test_how_a_sweep_is_run_is_no_part_of_what_a_run_is(cfg: TrainConfig) -> None:
    key = settings_key(asdict(cfg))
    same = replace(
        cfg,
        sweep=replace(cfg.sweep, jobs=2, fresh=True),
        trainer=replace(cfg.trainer, threads=2),
        experiment_name="other",
    )
    assert settings_key(asdict(same)) == key
    for changed in (
        replace(cfg, seed=2),
        replace(cfg, optim=replace(cfg.optim, lr=2e-5)),
        replace(cfg, trainer=replace(cfg.trainer, precision="64-true")),
    ):
        assert settings_key(asdict(changed)) != key


@pytest.mark.parametrize("damage", ["summary.json", "config.yaml"])
def test_half_a_record_is_no_finished_run(damage: str, cfg: TrainConfig, tmp_path: Path) -> None:
    folder = finished(tmp_path / "out" / "a", cfg)
    whole = (folder / damage).read_text()
    (folder / damage).write_text(whole[: len(whole) // 2] + '{"')
    assert finished_runs(tmp_path / "out") == {}


def test_a_run_that_did_not_end_well_is_no_finished_run(cfg: TrainConfig, tmp_path: Path) -> None:
    finished(tmp_path / "out" / "a", cfg, status="failed")
    assert finished_runs(tmp_path / "out") == {}


def test_only_a_run_that_can_go_on_is_gone_on_with(cfg: TrainConfig, tmp_path: Path) -> None:
    def begun(name: str, exit_code: int | None, checkpoint: bool = True) -> Path:
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(asdict(cfg)))
        RunFolder(folder).write_making(MAKING)
        if checkpoint:
            (folder / "checkpoints" / "step=2.safetensors").touch()
        if exit_code is not None:
            Ledger(tmp_path).note(name, "failed", exit=exit_code)
        return folder

    plan = Plan([], cfg, tmp_path / "new", making=MAKING)
    begun("without a checkpoint", None, checkpoint=False)
    begun("with other data now", 3)
    begun("with no good checkpoint", 4)
    begun("that became NaN", 5)
    assert with_resumable_folders([plan], Found({}, {})) == [plan]
    killed = begun("killed", -9)
    assert with_resumable_folders([plan], Found({}, {})) == [replace(plan, folder=killed)]
    assert with_resumable_folders([plan], Found({plan.folder: killed}, {})) == [plan]
    # Two plans with the same settings must not resume the same run.
    folders = [each.folder for each in with_resumable_folders([plan, plan], Found({}, {}))]
    assert folders == [killed, plan.folder]
    (killed / "summary.json").write_text("{}")
    assert with_resumable_folders([plan], Found({}, {})) == [plan]


def test_a_run_that_goes_on_is_resumed_with_the_packages_it_needs(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "mha,it's_s1_0"
    folder.mkdir()
    (folder / "config.yaml").touch()
    plan = Plan(["seed=1"], replace(cfg, allow_targets=["mine", "yours"]), folder)
    command_line = worker_command(OmegaConf.create(), plan)[3:]
    resume, others = resume_argument(command_line)
    assert resume == str(folder)
    assert others == ["allow_targets=[mine,yours]"]
