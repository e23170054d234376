"""What damaged checkpoints, NaN and Inf, and a second writer do to a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interrupted import SIX, begun, content, crash, fingerprint, once, steps_kept
from support import command, rows, train

from gptattn.errors import CheckpointError
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_run
from gptattn.training.module import LanguageModel

# Damage


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def one_bit(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("way", [cut, one_bit])
def test_a_damaged_newest_checkpoint_costs_one_interval(
    way: Callable[[bytes], bytes],
    whole: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 5, crash)
    assert command(tmp_path, *begun(tmp_path)) == 1
    assert steps_kept(run) == ["step=4.safetensors", "step=2.safetensors"]
    newest = run / "checkpoints" / "step=4.safetensors"
    newest.write_bytes(way(newest.read_bytes()))
    capfd.readouterr()
    assert load_run(run).source == run / "checkpoints" / "step=2.safetensors"
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: checkpoint: step=4.safetensors ")
    assert warning.endswith(f"; using {run}/checkpoints/step=2.safetensors instead")
    assert command(tmp_path, "resume=run") == 0
    out, err = capfd.readouterr()
    assert err.splitlines() == [warning.replace(f"{run}", "run")]
    assert "resumes after step 2" in out
    assert fingerprint(run) == whole("mha")


def test_with_no_good_checkpoint_a_run_does_not_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, *SIX)
    for path in RunFolder(run).known_checkpoints():
        path.write_bytes(cut(path.read_bytes()))
    before = content(run)
    capfd.readouterr()
    assert command(tmp_path, "resume=run") == 4
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "error: checkpoint: none in run/checkpoints can be used (step=6.safetensors cannot be read"
    )
    assert "step=4.safetensors cannot be read" in line
    assert content(run) == before
    with pytest.raises(CheckpointError, match="none in"):
        load_run(run)


def test_what_a_killed_save_has_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 3, crash)
    assert command(tmp_path, *begun(tmp_path)) == 1
    (run / "checkpoints" / "step=4.safetensors.part").write_bytes(b"whole, but without its name")
    (run / "summary.json.123.part").write_text("{")
    capfd.readouterr()
    assert command(tmp_path, "resume=run") == 0
    assert capfd.readouterr().err == ""
    assert not list(run.rglob("*.part"))
    assert steps_kept(run) == ["step=6.safetensors", "step=4.safetensors"]


# NaN and Inf


def test_a_weight_that_is_not_finite_reaches_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    validation_epoch_end = LanguageModel.on_validation_epoch_end

    def poisoned(self: LanguageModel) -> None:
        validation_epoch_end(self)
        if self.global_step == 4:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[3] = float("inf")

    monkeypatch.setattr(LanguageModel, "on_validation_epoch_end", poisoned)
    assert command(tmp_path, *begun(tmp_path, "sample.tokens=0")) == 5
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: weight model.")
    assert "is not finite after step 4" in line
    assert steps_kept(tmp_path / "run") == ["step=2.safetensors"]


def test_a_gradient_that_is_not_finite_stops_the_run_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before_step = LanguageModel.on_before_optimizer_step

    def poisoned(self: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
        gradient = next(self.model.parameters()).grad
        assert gradient is not None
        if self.global_step == 3:
            gradient.view(-1)[1] = float("inf")
        before_step(self, optimizer)

    monkeypatch.setattr(LanguageModel, "on_before_optimizer_step", poisoned)
    assert command(tmp_path, *begun(tmp_path)) == 5
    assert "error: train/grad_norm: is inf at step 4" in capfd.readouterr().err
    assert steps_kept(tmp_path / "run") == ["step=2.safetensors"]


# Two writers


def test_a_run_that_is_written_is_not_resumed_by_another(
    stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RunFolder(stopped / "run").lock():
        before = content(stopped / "run")
        assert command(stopped, "resume=run") == 6
        assert content(stopped / "run") == before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: resume: another process is writing to run; ")


@pytest.mark.parametrize("begun_already", [True, False])
def test_a_second_start_in_a_folder_writes_nothing(
    begun_already: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with RunFolder(run).lock():
        if begun_already:
            (run / "config.yaml").write_text("seed: 1\n")
        before = content(run)
        assert command(tmp_path, *begun(tmp_path, "seed=2")) == 6
        assert content(run) == before
        assert not (run / ".hydra").exists()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: hydra.run.dir: ")


def test_rows_before_the_checkpoint_that_are_gone_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    once(monkeypatch, "training_step", 3, crash)
    assert command(tmp_path, *begun(tmp_path)) == 1
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:1]), encoding="utf-8")
    capfd.readouterr()
    assert command(tmp_path, "resume=run") == 0
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: metrics.jsonl: ")
    assert warning.endswith("rows written before step 2 are missing")
    assert all(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    assert [row["step"] for row in rows(tmp_path / "run") if "val/loss" in row] == [4, 6]
