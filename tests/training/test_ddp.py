"""Several processes make the run of one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupted import fingerprint
from support import check_job, losses, refuses, rows, summary, tiny, train

from gptattn.data.sampler import rows_of
from gptattn.runs.load import load_run

TRAIN = Path(__file__).parents[2] / "train.py"
SHARED = (
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "model.num_layers=2",
    "batch_size=8",
    "accumulate=2",
    "budget.steps=6",
    "validation.count=3",
    "log_every=3",
    "run_dir=run",
)


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start a training command in the folder."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, TRAIN, *overrides],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [(), ("data=noisy_recall", "sample.tokens=0")], ids=["text", "task"]
)
def test_two_processes_make_the_losses_weights_and_rows_of_one(data, tmp_path):
    one = train(tmp_path / "one", *SHARED, *data)
    folder = tmp_path / "two"
    assert start(folder, *tiny(folder, *SHARED, *data, "trainer.devices=2")).wait() == 0
    two = folder / "run"
    for (step, loss), (same, expected) in zip(losses(two), losses(one), strict=True):
        assert step == same
        assert loss == pytest.approx(expected, rel=0, abs=1e-5)
    weights = [load_run(run).model.state_dict() for run in (two, one)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)
    kinds = [(row["step"], sorted(row.keys() - {"step", "time"})) for row in rows(two)]
    assert kinds == [(row["step"], sorted(row.keys() - {"step", "time"})) for row in rows(one)]
    assert len(list(two.glob("events.out.*"))) == 2  # as of one: its own, and its columns
    assert summary(two)["environment"]["processes"] == 2


@pytest.mark.slow
def test_two_processes_that_were_stopped_go_on_bit_for_bit(tmp_path):
    own = ("trainer.devices=2", "model.dropout=0.2", "budget.steps=40", "sample.tokens=0")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert start(whole, *tiny(whole, *SHARED, *own)).wait() == 0
    process = start(cut, *tiny(cut, *SHARED, *own))
    record = cut / "run" / "metrics.jsonl"
    while process.poll() is None and not (record.exists() and record.read_bytes().count(b"\n") > 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert not (cut / "run" / "summary.json").exists()
    assert start(cut, "resume=run").wait() == 0
    assert fingerprint(cut / "run") == fingerprint(whole / "run")


def test_the_processes_are_those_that_torchrun_has_started(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert check_job(tiny(tmp_path, "trainer.devices=auto")).trainer.processes == 2
    with refuses("trainer.devices: torchrun has started 2"):
        check_job(tiny(tmp_path, "trainer.devices=1"))


@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_processes_share_each_micro_batch_in_order(size, accumulate):
    parts = [rows_of(12, accumulate, rank, size) for rank in range(size)]
    micro = [part.reshape(accumulate, -1) for part in parts]
    for i, expected in enumerate(np.split(np.arange(12), accumulate)):
        assert [*np.concatenate([own[i] for own in micro])] == [*expected]
