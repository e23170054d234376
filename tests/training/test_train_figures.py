"""The values that a run records of itself: learning rate, memory and MFU."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import series, summary, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gptattn.training.preflight
import gptattn.training.run
from gptattn.compare.finished_runs import read_runs
from gptattn.data.run_data import RunData
from gptattn.machine.device import peak_memory_mb
from gptattn.settings.build import build_data

CPU = torch.device("cpu")


# An MFU above 1


def test_an_mfu_above_one_is_null_in_the_record_and_left_out_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # A device whose measured rate is one FLOP per second.
    monkeypatch.setattr(gptattn.training.run, "matmul_flops_per_second", lambda *_: 1.0)
    run = train(tmp_path)
    assert [value for _, value in series(run, "perf/mfu")] == [None] * 5
    assert ["perf/mfu", "null"] in [line.split() for line in capfd.readouterr().out.splitlines()]
    assert summary(run)["metrics"]["perf/mfu"] is None
    shown = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload().Tags()["scalars"]
    assert "perf/tokens_per_s" in shown
    assert "perf/mfu" not in shown
    (known,), passed_over = read_runs([run])
    assert passed_over == []
    assert "perf/mfu" not in known.metrics


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_the_peak_is_that_of_training_without_what_loading_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_loading = 0.0

    def hungry(*given: Any) -> RunData:
        nonlocal while_loading
        block = b"x" * 300_000_000
        while_loading = peak_memory_mb(CPU)
        del block
        return build_data(*given)

    monkeypatch.setattr(gptattn.training.preflight, "build_data", hungry)
    run = train(tmp_path)
    metrics = summary(run)["metrics"]
    assert metrics["perf/peak_memory_training_mb"] < while_loading - 200
    values = [value for _, value in series(run, "perf/peak_memory_training_mb")]
    # A peak never falls, apart from the counter's error.
    assert all(later > value - 5 for value, later in pairwise(values))
    assert len(values) == 5
