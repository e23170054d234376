"""A run that was stopped or killed resumes as if nothing had happened."""

import signal
import sys

import pytest
from interrupted import SIX, begun, crash, fingerprint, once, sent, steps_kept
from support import command, series, summary, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.mark.parametrize(
    "how",
    [
        ["attn=cross_layer", "trainer.precision=bf16-mixed", "optim=muon"],
        pytest.param(
            ["attn=gated_deltanet", "data=recall", "data.vocab_size=40", "data.pairs=3"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["attn=dsa", "accumulate=1"], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_died_goes_on_bit_for_bit(how, tmp_path, monkeypatch):
    if "data=recall" in how:
        how = [*how, "data.val_rows=9", "sample.tokens=0"]
    run, whole = tmp_path / "run", train(tmp_path / "whole", *SIX, *how)
    once(monkeypatch, "training_step", 3, crash)
    with pytest.raises(AssertionError, match="the run dies here"):
        train(tmp_path, *SIX, *how)
    assert steps_kept(run) == ["step=2.safetensors"]
    assert series(run, "train/loss")[-1][0] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 0.0, "train/loss": 9.9}\n{"step": 3, "ti')
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(run) == fingerprint(whole)
    assert summary(run)["steps"] == 6
    assert steps_kept(run) == ["step=6.safetensors", "step=4.safetensors"]
    # TensorBoard shows each point once.
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    for tag in ("train/loss", "val/loss"):
        shown = [event.step for event in events.Scalars(tag)]
        assert shown == [step for step, _ in series(run, tag)]


@pytest.mark.parametrize(
    ("method", "step", "number"),
    [
        ("training_step", 1, signal.SIGTERM),  # a validation follows this step
        ("validation_step", 4, signal.SIGINT),
        ("training_step", 2, signal.SIGTERM),
        pytest.param("training_step", 5, signal.SIGTERM, marks=pytest.mark.slow),  # the last
    ],
)
def test_a_run_that_was_stopped_saves_and_goes_on_bit_for_bit(
    method, step, number, whole, tmp_path, monkeypatch, capfd
):
    run = tmp_path / "run"
    taken = step + (method == "training_step")
    once(monkeypatch, method, step, sent(number))
    assert command(tmp_path, *begun(tmp_path, "attn=gqa")) == 128 + number
    err = capfd.readouterr().err
    assert err.startswith({signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number])
    assert f"run: saved the state after step {taken}; to resume: gptattn-train resume=run" in err
    assert "Traceback" not in err
    assert steps_kept(run)[0] == f"step={taken}.safetensors"
    assert taken not in dict(series(run, "val/loss"))  # abandoned, and made up below
    assert not (run / "summary.json").exists()
    assert fingerprint(run) != whole("gqa")
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(run) == whole("gqa")
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("val/loss")] == [2, 4, 6]


DRAWING = """
import signal
import lightning.pytorch as L
import torch

SENT = []

class Drawing(L.Callback):
    def on_validation_start(self, *args):
        torch.rand(3)

    def on_validation_epoch_end(self, trainer, pl_module):
        while SENT and trainer.global_step == 4:
            signal.raise_signal(SENT.pop(0))
"""


def test_neither_a_sample_nor_a_second_ctrl_c_keeps_a_run_from_saving(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawing.py").write_text(DRAWING)
    own = begun(tmp_path, "trainer.callbacks={mine:{_target_:drawing.Drawing}}")
    assert command(tmp_path, *own, "run_dir=whole") == 0
    sys.modules["drawing"].SENT[:] = [signal.SIGTERM, signal.SIGINT]
    assert command(tmp_path, *own) == 143
    assert "begins with this validation" in capfd.readouterr().err
    assert steps_kept(tmp_path / "run") == ["step=4.safetensors", "step=2.safetensors"]
    assert 4 not in dict(series(tmp_path / "run", "sample/text"))
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once_and_the_run_resumes_or_restarts(
    whole, tmp_path, monkeypatch, capfd
):
    def twice(_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    once(monkeypatch, "training_step", 1, twice)
    assert command(tmp_path, *begun(tmp_path)) == 130
    assert "Ctrl-C again stops it now" in capfd.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
    once(monkeypatch, "training_step", 3, twice)
    assert command(tmp_path, "resume=run") == 130
    assert steps_kept(tmp_path / "run") == ["step=2.safetensors"]
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == whole("mha")


def test_a_run_that_died_before_its_summary_gets_one(whole, finished, tmp_path):
    run = finished
    before = summary(run)["metrics"]
    (run / "summary.json").unlink()
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(run) == whole("mha")
    after = summary(run)["metrics"]
    assert all(after[name] == before[name] for name in ("val/loss", "train/loss"))


@pytest.mark.slow
def test_a_budget_in_seconds_goes_on_counting(tmp_path, monkeypatch):
    seconds = ("budget.steps=null", "budget.seconds=0.5", "log_every=1")
    once(monkeypatch, "training_step", 1, sent(signal.SIGTERM))
    assert command(tmp_path, *begun(tmp_path, *seconds)) == 143
    before = dict(series(tmp_path / "run", "progress/seconds"))[2]
    assert command(tmp_path, "resume=run") == 0
    after = [value for _, value in series(tmp_path / "run", "progress/seconds")]
    assert after == sorted(after)
    assert before < 0.5 <= after[-1]
