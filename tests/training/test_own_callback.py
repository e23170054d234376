"""A Lightning callback of the user's own: one line in it makes a metric."""

from pathlib import Path

import pytest
from interrupted import begun, crash, fingerprint, once
from support import command, config, rows, series, summary, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptattn import load_curves
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.table import load_comparison
from gptattn.errors import ConfigError
from gptattn.runs.folder import RunFolder

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


def write_callback(folder: Path) -> str:
    """A module with a callback, named as this folder, which it is in; the setting that names it."""
    (folder / f"{folder.name}.py").write_text(NUMBERS)
    return f"trainer.callbacks={{mine:{{_target_:{folder.name}.Numbers,scale:2}}}}"


def test_a_metric_is_one_line_in_a_callback(tmp_path):
    chosen = write_callback(tmp_path)
    more = ("accumulate=2", "log_every=2", "budget.steps=4", "run_dir=run")
    assert command(tmp_path, *tiny(tmp_path, *more, chosen)) == 0
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
    with pytest.raises(ConfigError, match=r"^metrics: .*train/number"):
        load_comparison(run, metrics=["train/numbre"])
    assert config(run)["code_folders"] == [str(tmp_path)]


def test_a_callback_changes_the_result_and_is_held_by_its_source(tmp_path):
    chosen = write_callback(tmp_path)
    assert command(tmp_path, *tiny(tmp_path, "run_dir=runs/a", chosen)) == 0
    assert command(tmp_path, *tiny(tmp_path, "run_dir=runs/b")) == 0
    code = RunFolder(tmp_path / "runs" / "a").read_provenance().code
    assert tmp_path.name in code
    theirs = "trainer.callbacks={theirs:{_target_:lightning.pytorch.callbacks.Timer}}"
    assert command(tmp_path, *tiny(tmp_path, "run_dir=runs/c", theirs)) == 0
    assert RunFolder(tmp_path / "runs" / "c").read_provenance().code["lightning"][:8] == "version "
    settings = [run.settings for run in read_runs([tmp_path / "runs"])[0]]
    assert len({str(sorted(one.items())) for one in settings}) == 3


def test_a_run_with_a_callback_resumes_bit_for_bit(tmp_path, monkeypatch):
    chosen = write_callback(tmp_path)
    assert command(tmp_path, *begun(tmp_path, chosen, "run_dir=whole")) == 0
    once(monkeypatch, "training_step", 5, crash)
    assert command(tmp_path, *begun(tmp_path, chosen)) == 1
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("{_target_:HERE.Number}", "_target_"),
        ("{_target_:HERE.Numbers,scal:2}", "scal"),
        ("{_target_:HERE.Numbers,scale:two}", "scale"),
        ("{_target_:lightning.pytorch.loggers.CSVLogger,save_dir:a}", "_target_"),
        ("{_target_:shutil.rmtree}", "_target_"),
        ("{}", "_target_"),
    ],
)
def test_a_wrong_callback_is_refused_before_anything_starts(spec, field, tmp_path, capfd):
    write_callback(tmp_path)
    given = tiny(
        tmp_path, f"trainer.callbacks={{mine:{spec}}}".replace("HERE", tmp_path.name), "run_dir=run"
    )
    assert command(tmp_path, *given) == 2
    assert capfd.readouterr().err.startswith(f"error: trainer.callbacks.mine.{field}: ")
    assert not (tmp_path / "run").exists()


def test_a_callback_that_is_no_mapping_is_refused(tmp_path, capfd):
    assert command(tmp_path, *tiny(tmp_path, "trainer.callbacks={mine:3}")) == 2
    assert capfd.readouterr().err.startswith("error: trainer.callbacks.mine: ")
