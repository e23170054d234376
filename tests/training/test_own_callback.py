"""A Lightning callback of the user's own: one line in it makes a metric."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
from interrupted import crash, fingerprint, once
from support import check_job, command, config, refuses, rows, series, summary, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptattn import load_curves
from gptattn.compare.table import load_comparison
from gptattn.settings.identity import hash_code_for, settings_key

# The micro-batch's number, an infinity, and in a validation the number of its last batch.
NUMBERS = """
import lightning.pytorch as L

class Numbers(L.Callback):
    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("train/number", self.scale * batch_idx)
        if trainer.global_step == 3:
            self.log("train/rare", float("inf"))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("val/batches", float(batch_idx), reduce_fx="max")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a callback, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{tmp_path.name}.py").write_text(NUMBERS)
    return tmp_path.name


def test_a_metric_is_one_line_in_a_callback_and_its_run_resumes_exactly(
    mine, tmp_path, monkeypatch
):
    chosen = f"trainer.callbacks={{mine:{{_target_:{mine}.Numbers,scale:2}}}}"
    given = tiny(tmp_path, "accumulate=2", "log_every=2", "budget.steps=4", chosen)
    assert command(tmp_path, *given, "run_dir=run") == 0
    run = tmp_path / "run"
    # Rows follow steps 1, 2 and 4: micro-batches 0 and 1, 2 and 3, 4 to 7, and twice their numbers.
    expected = [(1, 1.0), (2, 5.0), (4, 11.0)]
    assert series(run, "train/number") == expected
    assert series(run, "train/rare") == [(4, None)]  # not JSON
    assert [step for step, _ in series(run, "val/batches")] == [2, 4]
    assert not any("epoch" in row for row in rows(run))
    with_loss = [row["step"] for row in rows(run) if "train/loss" in row and "train/number" in row]
    assert with_loss == [1, 2, 4]
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/number")] == expected
    assert [e.step for e in events.Scalars("val/batches")] == [2, 4]
    curves = load_curves(run)
    own = curves[curves["metric"] == "train/number"]
    assert [*zip(own["step"], own["value"], strict=True)] == expected
    assert summary(run)["metrics"]["train/number"] == 11.0
    report = load_comparison(run, metrics=["train/number"])
    assert "train/number" in str(report)
    assert report.table()["train/number"].tolist() == [11.0]
    with refuses("metrics: train/number"):
        load_comparison(run, metrics=["train/numbre"])
    assert config(run)["code_folders"] == [str(tmp_path)]

    once(monkeypatch, "training_step", 3, crash)
    assert command(tmp_path, *given, "run_dir=cut") == 1
    assert command(tmp_path, "resume=cut") == 0
    assert fingerprint(tmp_path / "cut") == fingerprint(run)


def test_a_callback_changes_the_result_and_is_held_by_its_source(mine, tmp_path):
    targets = (f"{mine}.Numbers", "lightning.pytorch.callbacks.Timer")
    chosen = [f"trainer.callbacks={{it:{{_target_:{target}}}}}" for target in targets]
    given = [tiny(tmp_path, *more) for more in (chosen[:1], chosen[1:], [])]
    own, theirs, none = map(check_job, given)
    assert mine in hash_code_for(own)
    assert hash_code_for(theirs)["lightning"].startswith("version ")
    assert len({settings_key(asdict(cfg)) for cfg in (own, theirs, none)}) == 3


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("{_target_:HERE.Number}", "._target_"),
        ("{_target_:HERE.Numbers,scal:2}", ".scal"),
        ("{_target_:HERE.Numbers,scale:two}", ".scale"),
        ("{_target_:lightning.pytorch.loggers.CSVLogger,save_dir:a}", "._target_"),
        ("{_target_:shutil.rmtree}", "._target_"),
        ("{}", "._target_"),
        ("3", ""),
    ],
)
def test_a_wrong_callback_is_refused_before_anything_starts(spec, field, mine, tmp_path):
    given = tiny(tmp_path, f"trainer.callbacks={{mine:{spec}}}".replace("HERE", mine))
    with refuses(f"trainer.callbacks.mine{field}: "):
        check_job(given)


LIGHTNING = "lightning.pytorch.callbacks"


@pytest.mark.parametrize(
    ("callback", "field"),
    [
        ("EarlyStopping,monitor:val/loss,stopping_threshold:99", "trainer.callbacks: .* 2 steps"),
        ("EarlyStopping,monitor:val/nope", "trainer.callbacks: RuntimeError: .*val/nope"),
        ("ModelCheckpoint", "trainer.callbacks.a: "),
    ],
)
def test_a_callback_that_does_not_fit_ends_the_run_in_one_line(callback, field, tmp_path, capfd):
    stops = f"trainer.callbacks={{a:{{_target_:{LIGHTNING}.{callback}}}}}"
    given = tiny(tmp_path, "budget.steps=4", stops)
    assert command(tmp_path, *given, f"run_dir={tmp_path / 'run'}") == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.match(f"error: {field}", *said)
    assert not (tmp_path / "run" / "summary.json").exists()
