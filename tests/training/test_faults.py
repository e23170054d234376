"""What damage, NaN and Inf, a second writer, and files that vanish do to a run."""

import contextlib
import os
import re

import pytest
import torch
from interrupted import begun, content, crash, fingerprint, once, steps_kept
from support import command, is_complaint, refuses, tiny

from gptattn.machine.disk import PART
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_run
from gptattn.training.module import LanguageModel


def test_a_damaged_checkpoint_costs_one_interval_and_partial_files_go(
    whole, tmp_path, monkeypatch, capfd
):
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 5, crash)
    assert command(tmp_path, *begun(tmp_path)) == 1
    assert steps_kept(run) == ["step=4.safetensors", "step=2.safetensors"]
    newest = run / "checkpoints" / "step=4.safetensors"
    data = newest.read_bytes()
    newest.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    (run / "checkpoints" / f"step=6.safetensors.1{PART}").write_bytes(
        b"whole, but without its name"
    )
    (run / f"summary.json.123{PART}").write_text("{")
    (run / "movie.part").write_text("of another program")
    capfd.readouterr()
    assert load_run(run).source == run / "checkpoints" / "step=2.safetensors"
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: checkpoint: step=4.safetensors ")
    assert command(tmp_path, "resume=run") == 0
    out, err = capfd.readouterr()
    assert err.splitlines() == [warning.replace(f"{run}", "run")]
    assert "resumes after step 2" in out
    assert fingerprint(run) == whole("mha")
    assert not list(run.rglob(f"*{PART}"))
    assert (run / "movie.part").is_file()


def test_with_no_good_checkpoint_a_run_does_not_go_on(finished, tmp_path, capfd):
    run = finished
    for path in RunFolder(run).known_checkpoints():
        path.write_bytes(path.read_bytes()[:100])
    before = content(run)
    capfd.readouterr()
    assert command(tmp_path, "resume=run") == 4
    assert is_complaint(capfd.readouterr().err, "checkpoint: step=4.safetensors cannot be read")
    assert content(run) == before
    with refuses("*: none in", 4):
        load_run(run)


@pytest.mark.parametrize(
    ("method", "step", "ruined", "said"),
    [
        ("on_validation_epoch_end", 4, "data", r"weight model\..* step 4"),
        ("training_step", 3, "data", "train/loss: .* step 4"),
        ("on_before_optimizer_step", 3, "grad", "train/grad_norm: .* step 4"),
    ],
)
def test_what_is_not_finite_ends_the_run_and_reaches_no_checkpoint(
    method, step, ruined, said, tmp_path, monkeypatch, capfd
):
    def ruin(module: LanguageModel) -> None:
        getattr(next(module.model.parameters()), ruined).view(-1)[3] = torch.inf

    once(monkeypatch, method, step, ruin)
    assert command(tmp_path, *begun(tmp_path, "sample.tokens=0")) == 5
    assert re.match(f"error: {said}", capfd.readouterr().err.splitlines()[-1])
    assert steps_kept(tmp_path / "run") == ["step=2.safetensors"]


def test_a_run_that_is_written_is_not_resumed_by_another(stopped, capfd):
    with RunFolder(stopped / "run").lock():
        before = content(stopped / "run")
        assert command(stopped, "resume=run") == 6
        assert content(stopped / "run") == before
    assert is_complaint(capfd.readouterr().err, "resume: another process")


def test_a_second_start_in_a_folder_writes_nothing(tmp_path, capfd):
    run = tmp_path / "run"
    with RunFolder(run).lock():
        assert command(tmp_path, *begun(tmp_path)) == 6
    (run / "config.yaml").write_text("seed: 1\n")
    before = content(run)
    assert command(tmp_path, *begun(tmp_path)) == 6
    assert content(run) == before
    assert [path.name for path in before] == [".lock", "config.yaml"]
    for line in capfd.readouterr().err.splitlines():
        assert line.startswith("error: run_dir: ")


def test_a_run_whose_folder_is_gone_ends_in_one_line_and_makes_no_other(
    tmp_path, monkeypatch, capfd
):
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 3, lambda _: run.rename(tmp_path / "moved"))
    assert command(tmp_path, *begun(tmp_path)) == 7
    assert is_complaint(capfd.readouterr().err, "run: removed")
    assert not run.exists()
    assert command(tmp_path, "resume=moved") == 0


def test_a_run_whose_output_nobody_reads_ends_and_can_be_resumed(tmp_path, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, contextlib.redirect_stdout(stdout):
        assert command(tmp_path, *tiny(tmp_path, "run_dir=run")) == 141
    assert "Traceback" not in capfd.readouterr().err
    assert command(tmp_path, "resume=run") == 0
