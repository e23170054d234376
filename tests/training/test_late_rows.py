"""Where the host runs ahead of its device, rows are written late, and are the same.

A CPU is told here that its host runs ahead of it.
"""

import signal
from types import SimpleNamespace

import pytest
from interrupted import SIX, begun, fingerprint, once, sent
from support import command, rows, series, train

from gptattn.runs.checkpoint import RunState
from gptattn.training.callbacks import MetricRows, StepClock


@pytest.fixture(autouse=True)
def _late(whole, monkeypatch: pytest.MonkeyPatch) -> None:
    whole("gqa")  # made before, as a CPU does
    for user in ("callbacks", "module"):
        monkeypatch.setattr(f"gptattn.training.{user}.runs_ahead", lambda device: True)


def test_a_row_is_written_when_the_next_is_due_or_before_a_validation(tmp_path, monkeypatch):
    seen = []
    log = MetricRows._log

    def watch(own, trainer, module):
        log(own, trainer, module)
        seen.append((trainer.global_step, own.state.last.get("train/loss")))

    monkeypatch.setattr(MetricRows, "_log", watch)
    run = train(tmp_path, "budget.steps=5", "log_every=1", "validation.count=1")
    loss = dict(series(run, "train/loss"))
    assert [*loss] == [1, 2, 3, 4, 5]
    assert seen == [(1, None), *[(step, loss[step - 1]) for step in (2, 3, 4, 5)]]
    taken = [row["perf/step_ms"] / 1e3 for row in rows(run) if "train/loss" in row]
    assert sum(taken) == pytest.approx(series(run, "progress/seconds")[-1][1])


def test_what_a_row_reads_is_read_after_the_device_has_made_it(monkeypatch):
    order = []

    class Moment:
        def __init__(self, device):
            pass

        def seconds_since(self, other):
            order.append("waited")
            return 1.0

    monkeypatch.setattr("gptattn.training.callbacks.Moment", Moment)
    prepared = SimpleNamespace(
        state=RunState(), device=None, cfg=SimpleNamespace(compile=False, kinds=list)
    )
    clock = StepClock(prepared)
    clock.time_steps(lambda: order.append("written"))  # without a step, as before a validation
    assert order == []
    clock.settle()
    assert order[:2] == ["waited", "written"]


def test_late_rows_equal_immediate_ones_with_or_without_a_stop(whole, tmp_path, monkeypatch):
    assert fingerprint(train(tmp_path / "late", *SIX, "attn=gqa")) == whole("gqa")
    once(monkeypatch, "training_step", 2, sent(signal.SIGTERM))  # a row waits after that step
    assert command(tmp_path, *begun(tmp_path, "attn=gqa")) == 143
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == whole("gqa")


def test_a_loss_that_is_not_finite_ends_the_run_a_row_later_with_its_step(
    tmp_path, monkeypatch, capfd
):
    def ruin(module):
        next(module.model.parameters()).data.view(-1)[3] = float("inf")

    once(monkeypatch, "training_step", 3, ruin)
    own = ("log_every=1", "validation.count=1")
    assert command(tmp_path, *begun(tmp_path, *own)) == 5
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: train/loss: is nan at step 4")
    assert [step for step, _ in series(tmp_path / "run", "train/loss")] == [1, 2, 3]


def test_the_row_that_waits_is_written_when_a_run_ends_early(tmp_path, monkeypatch):
    once(monkeypatch, "training_step", 4, sent(signal.SIGTERM))
    own = ("log_every=1", "validation.count=1", "checkpoint=false")
    assert command(tmp_path, *begun(tmp_path, *own)) == 143
    assert [step for step, _ in series(tmp_path / "run", "train/loss")] == [1, 2, 3, 4, 5]
