"""The values that a run records of itself: learning rate, memory, MFU, and slow steps."""

import io
import json
import sys
from array import array
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interrupted import once, sent
from support import command, run_folders, series, summary, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gptattn.data.sampler
import gptattn.training.preflight
import gptattn.training.run
from gptattn.compare.finished_runs import read_runs
from gptattn.data.tokens import TokenData
from gptattn.machine.device import peak_memory_mb
from gptattn.runs.checkpoint import read_checkpoint, write_checkpoint
from gptattn.settings.build import build_data
from gptattn.training.callbacks import StepClock

CPU = torch.device("cpu")


def test_the_first_steps_of_a_long_run_have_a_rate_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, "training_step", 3, sent(15))
    assert command(tmp_path, *tiny(tmp_path, "budget.steps=60000", "hydra.run.dir=run")) == 143
    # 5% of 60,000 steps is warm-up: 3,000 steps up to the peak of 0.002.
    expected = [(step, pytest.approx(0.002 * step / 3000)) for step in (1, 2, 3)]
    assert series(tmp_path / "run", "train/lr")[:3] == expected


# An MFU above 1


@pytest.fixture(scope="module")
def slow_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on a device whose measured rate is one FLOP per second, and its console output."""
    folder = tmp_path_factory.mktemp("slow_device")
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gptattn.training.run, "matmul_flops_per_second", lambda *_: 1.0)
        patch.setattr(sys, "stderr", said)
        patch.setattr(sys, "stdout", said)
        run = train(folder)
    return run, said.getvalue()


def test_an_mfu_above_one_is_null_in_the_record_and_in_the_summary(
    slow_device: tuple[Path, str],
) -> None:
    run, _ = slow_device
    assert [value for _, value in series(run, "perf/mfu")] == [None] * 5
    assert summary(run)["metrics"]["perf/mfu"] is None
    shown = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload().Tags()["scalars"]
    assert "perf/tokens_per_s" in shown
    assert "perf/mfu" not in shown


def test_an_mfu_above_one_is_warned_of_once_and_shown_as_null(
    slow_device: tuple[Path, str],
) -> None:
    _, said = slow_device
    assert said.count("warning: perf/mfu: is ") == 1
    assert [line.split() for line in said.splitlines() if line.startswith("  perf/mfu")] == [
        ["perf/mfu", "null"]
    ]


def test_a_run_without_an_mfu_is_compared_and_goes_on(
    slow_device: tuple[Path, str], tmp_path: Path
) -> None:
    run, _ = slow_device
    (known,), passed_over = read_runs([run])
    assert passed_over == []
    assert "perf/mfu" not in known.metrics
    home = run.parents[2]
    assert command(home, f"resume='{run}'", "budget.steps=6") == 0
    assert summary(run)["steps"] == 6
    assert 0 < summary(run)["metrics"]["perf/mfu"] <= 1  # with the device's true rate again


def test_no_other_figure_of_a_checkpoint_may_be_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, "validation.count=1")
    file = run / "checkpoints" / "step=4.safetensors"
    content = read_checkpoint(file)
    content["callbacks"]["MetricRows"]["last"]["train/loss"] = None
    write_checkpoint(file, content)
    assert command(tmp_path, f"resume='{run}'", "budget.steps=6") == 4
    assert "its newest row is not that of a run" in capfd.readouterr().err


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_the_peak_is_the_whole_processs_and_trainings_own_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_loading = 0.0

    def hungry(*given: Any) -> TokenData:
        nonlocal while_loading
        block = b"x" * 300_000_000
        while_loading = peak_memory_mb(CPU)
        del block
        return build_data(*given)

    monkeypatch.setattr(gptattn.training.preflight, "build_data", hungry)
    run = train(tmp_path)
    metrics = summary(run)["metrics"]
    assert metrics["perf/peak_memory_mb"] > while_loading - 5  # the counter is not exact
    assert metrics["perf/peak_memory_training_mb"] < while_loading - 200
    for name in ("perf/peak_memory_mb", "perf/peak_memory_training_mb"):
        values = [value for _, value in series(run, name)]
        # A peak never falls, apart from the counter's error.
        assert all(later > value - 5 for value, later in pairwise(values))
        assert len(values) == 5


# Others on the machine


def clock_of(*seconds: float) -> StepClock:
    clock = StepClock(CPU)
    clock.step_seconds = array("d", seconds)
    return clock


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], 1.0),
        ([9.0] + [1.0] * 20 + [8.0] * 19, 1.0),  # too few steps to compare
        ([9.0] + [1.0] * 20 + [8.0] * 20, 8.0),
        ([9.0] + [1.0] * 20 + [1.0] * 50 + [3.0] * 20, 3.0),
        ([9.0] + [1.0] * 20 + [8.0] * 50 + [1.0] * 20, 1.0),
        ([9.0] + [1.0] * 20 + [1.0] * 11 + [99.0] * 9, 1.0),  # a few slow steps do not count
    ],
)
def test_the_newest_steps_are_held_against_the_first_by_their_medians(
    seconds: list[float], expected: float
) -> None:
    assert clock_of(*seconds).slowdown() == expected


def test_a_run_on_a_machine_that_others_come_to_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reads = 0

    def perf_counter() -> float:
        # A step reads the clock twice. The first 30 steps take a second each, the others 10.
        nonlocal reads
        reads += 1
        steps = reads / 2
        return steps if steps <= 30 else 30 + 10 * (steps - 30)

    clock = SimpleNamespace(perf_counter=perf_counter)
    monkeypatch.setattr(gptattn.training.callbacks, "time", clock)
    monkeypatch.setattr(gptattn.data.sampler, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    train(tmp_path, "budget.steps=120", "checkpoint=false", "sample.tokens=0", "log_every=50")
    said = [line for line in capfd.readouterr().out.splitlines() if "times as long" in line]
    assert said == [
        "warning: steps take 10 times as long as at the start: others seem to use this machine"
    ]
    (run,) = run_folders(tmp_path)
    assert json.loads((run / "summary.json").read_text())["steps"] == 120
