"""A sweep with `trainer.precision=auto` has one precision, and keeps it when it goes on."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from support import command, config, ledger_lines, run_folders, tiny

from gptattn.cli.main import check_job
from gptattn.settings.config import Precision, TrainConfig
from gptattn.sweep import one_precision as module

pytestmark = pytest.mark.usefixtures("no_estimate")


def sweep(folder: Path, *overrides: str) -> int:
    own = ["hydra/launcher=basic", "budget.steps=2", "sample.tokens=0", "validation.count=1"]
    auto = ["trainer.precision=auto", "experiment_name=e"]
    return command(folder, "-m", *tiny(folder, *own, *auto, *overrides))


def chooses(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> list[int]:
    """Let the trial choose this precision; return the list of how many settings it was given."""
    trials: list[int] = []

    def measured(cfgs: Sequence[TrainConfig]) -> Precision:
        trials.append(len(cfgs))
        return precision

    monkeypatch.setattr(module, "_measured", measured)
    return trials


def test_a_sweep_chooses_once_and_keeps_it_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = chooses(monkeypatch, "bf16-mixed")
    assert sweep(tmp_path, "seed=1", "attn=mha,mqa") == 0
    assert trials == [2]
    kept = "trainer.precision=auto: bf16-mixed, as chosen before\n"
    assert kept not in capsys.readouterr().out
    trials = chooses(monkeypatch, "32-true")
    assert sweep(tmp_path, "seed=1,2", "attn=mha") == 0
    assert trials == []
    assert kept in capsys.readouterr().out
    runs = run_folders(tmp_path)
    assert len(runs) == 3
    assert {config(run)["trainer"]["precision"] for run in runs} == {"bf16-mixed"}
    assert len([e for e in ledger_lines(tmp_path / "outputs/e") if e["state"] == "done"]) == 3
    # Another batch is other work, so that its choice may be another.
    assert sweep(tmp_path, "seed=1", "batch_size=2") == 0
    assert trials == [1]


def test_runs_of_a_given_precision_do_not_decide_for_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = chooses(monkeypatch, "bf16-mixed")
    assert sweep(tmp_path, "seed=1", "trainer.precision=32-true") == 0
    assert trials == []
    assert sweep(tmp_path, "seed=1") == 0
    found = [config(run)["trainer"] for run in run_folders(tmp_path)]
    assert {(t["precision"], t["auto_precision"]) for t in found} == {
        ("32-true", False),
        ("bf16-mixed", True),
    }


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path))


def test_the_trial_process_answers_with_the_seconds_of_both(cfg: TrainConfig) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gptattn.sweep.one_precision"],
        input=json.dumps(asdict(cfg)),
        capture_output=True,
        text=True,
        check=True,
    )
    wide, half = json.loads(done.stdout.splitlines()[-1])
    assert min(wide, half) > 0


def test_a_trial_that_fails_leaves_the_sweep_in_float32(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.sys, "executable", "/nowhere/python")
    assert module._measured([cfg]) == "32-true"
    assert "trainer.precision=auto: 32-true; the trial failed" in capsys.readouterr().out
