"""Sweeps from the command line: failed runs do not end them, and a rerun makes what is missing."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support import command, config, ledger_lines, losses, run_folders, summary, tiny, train
from tortures.bench import fingerprint

from gptattn.settings.compose import CONF
from gptattn.machine.device import usable_cpus
from gptattn.runs.sweep_states import LEDGER


def test_a_sweep_makes_a_folder_per_run_with_a_readable_name(tmp_path: Path) -> None:
    arguments = tiny(
        tmp_path,
        "budget.steps=2",
        "checkpoint=false",
        "experiment_name=four",
        "hydra/launcher=basic",
    )
    sweep = ["attn=mha,gqa", "seed=1,2"]
    assert command(tmp_path, "-m", *arguments, *sweep) == 0
    runs = run_folders(tmp_path)
    assert len(runs) == 4
    assert {run.parent for run in runs} == {tmp_path / "outputs" / "four"}
    for run in runs:
        record = summary(run)
        # Overrides that all runs share are left out of the names.
        assert re.fullmatch(rf"{record['variant']}_s{record['seed']}_[0-9a-f]{{6}}", run.name)
        assert record["run"] == run.name
        assert config(run)["seed"] == record["seed"]
        assert len(list(run.glob("events.out.*"))) == 1
    assert {(summary(run)["variant"], summary(run)["seed"]) for run in runs} == {
        (variant, seed) for variant in ("mha", "gqa") for seed in (1, 2)
    }
    files = {path.name for path in (tmp_path / "outputs" / "four").iterdir() if path.is_file()}
    assert files == {"multirun.yaml", "ledger.jsonl", ".sweep.lock"}


@pytest.mark.slow
@pytest.mark.usefixtures("no_estimate")
def test_a_run_in_a_sweep_is_the_run_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "model.num_layers=2", "attn=gqa", "-m")
    assert command(tmp_path, *arguments) == 0
    for run in run_folders(tmp_path):
        alone = runs[summary(run)["variant"]]
        assert losses(run) == losses(alone)
        assert summary(run)["metrics"]["cost/params"] == summary(alone)["metrics"]["cost/params"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_estimate")
def test_a_sweep_outlives_a_failed_run_and_the_rerun_makes_only_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny(tmp_path, "optim.lr=1e-3,1e30", "checkpoint=false"), "-m"]
    assert command(tmp_path, *arguments) == 5
    out, err = capfd.readouterr()
    assert "2 runs, in outputs/scratch" in out
    assert "2 to run" in out
    assert out.count("FAILED") == 1
    assert err == "error: sweep: 1 of 2 runs failed; the same command runs them again\n"
    done = run_folders(tmp_path)
    ledger = tmp_path / "outputs" / "scratch"
    failed = [line for line in ledger_lines(ledger) if line["state"] == "failed"]
    assert {line["exit"] for line in failed} == {5}
    assert all("train/" in line["reason"] or "val/loss" in line["reason"] for line in failed)

    before = len(ledger_lines(ledger))
    assert command(tmp_path, *arguments) == 5
    out = capfd.readouterr().out
    assert "1 already done" in out
    started = [line for line in ledger_lines(ledger)[before:] if line["state"] == "running"]
    assert all("optim.lr=1e+30" in line["overrides"] for line in started)
    assert len(started) == 1
    assert run_folders(tmp_path) == done


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_with_130_and_the_rerun_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = ("budget.steps=40", "validation.count=20", "log_every=50", "model.dropout=0.1")
    arguments = [*tiny(tmp_path, *long, "seed=1,2", "sweep.jobs=1"), "-m"]
    start = [sys.executable, str(CONF.parent / "train.py"), *arguments]
    process = subprocess.Popen(
        start,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts background jobs, perhaps these tests, with SIGINT ignored: undo that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    ledger = tmp_path / "outputs" / "scratch" / LEDGER
    deadline = time.monotonic() + 120
    while len(list(ledger.parent.glob("mha_s2*/checkpoints/*.safetensors"))) == 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)  # it should not end; asking without a pause would slow it
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"stopped: 1 of 2 runs are done; the same command runs the others" in err
    assert b"Traceback" not in err
    states = [line["state"] for line in ledger_lines(ledger.parent)]
    assert states == ["submitted", "submitted", "running", "done", "running", "interrupted"]
    capfd.readouterr()
    assert command(tmp_path, *arguments) == 0
    assert "2 runs, 1 already done, 1 to resume" in capfd.readouterr().out
    first, second = run_folders(tmp_path)
    assert [summary(run)["seed"] for run in (first, second)] == [1, 2]
    assert {path.name for path in ledger.parent.glob("mha*")} == {first.name, second.name}
    lines = ledger_lines(ledger.parent)
    assert [line["state"] for line in lines[6:]] == ["submitted", "running", "done"]
    assert lines[6]["run"] == lines[4]["run"] == second.name
    assert "resumes after step" in (second / "console.log").read_text(encoding="utf-8")
    alone = train(tmp_path / "alone", *long, "seed=2")
    assert fingerprint(second) == fingerprint(alone)


@pytest.mark.slow
def test_runs_can_be_sent_through_submitit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny(tmp_path, "launcher=submitit_local", "optim.lr=1e-3,1e30"), "-m"]
    assert command(tmp_path, *arguments) == 5  # that of the run that diverged
    assert "1 of 2 runs failed" in capfd.readouterr().err
    states = [line["state"] for line in ledger_lines(tmp_path / "outputs" / "scratch")]
    assert states == ["submitted", "submitted", "done", "failed"]
    assert len(run_folders(tmp_path)) == 1


def test_the_suite_is_a_sweep_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, "experiment=attention_suite")) == 2
    assert "add -m" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hydra.sweep.subdir=x", "seed=1,2"], "error: hydra.sweep.subdir: gives several runs"),
        (["hydra.sweep.subdir=../../y"], "error: hydra.sweep.subdir: '../../y' is not a folder"),
        (["hydra.sweep.subdir=."], "error: hydra.sweep.subdir: '.' is not a folder name"),
        ([f"sweep.jobs={usable_cpus() + 1}"], "error: sweep.jobs: "),
        (["attn=mha,gqaa"], "error: attn: 'gqaa' is unknown"),
        (["match=params", "match_to=mhaa", "seed=1,2"], "error: match_to: 'mhaa' is not a variant"),
    ],
)
def test_a_sweep_that_cannot_work_writes_nothing(
    arguments: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, *arguments), "-m") == 2
    assert capfd.readouterr().err.startswith(said)
    assert not (tmp_path / "outputs").exists()
