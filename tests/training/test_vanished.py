"""A run whose folder or files vanish, or whose output nobody reads, ends with one line."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from interrupted import begun, once
from support import command, rows, tiny

TAKEN: dict[str, Callable[[Path], object]] = {
    # Renamed first: TensorBoard's thread could add a file to the folder while it is being emptied.
    "removed": lambda run: shutil.rmtree(run.rename(run.with_name("trash"))),
    "moved": lambda run: run.rename(run.with_name("moved")),
}


@pytest.mark.parametrize("way", TAKEN)
def test_a_run_whose_folder_is_gone_ends_in_one_line_and_makes_no_other(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 3, lambda: TAKEN[way](run))
    assert command(tmp_path, *begun(tmp_path)) == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: run: was removed or moved during the run; ")
    assert not run.exists()
    if way == "moved":
        assert command(tmp_path, "resume=moved") == 0


def test_a_run_whose_rows_are_gone_ends_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    once(monkeypatch, "training_step", 3, (tmp_path / "run" / "metrics.jsonl").unlink)
    assert command(tmp_path, *begun(tmp_path)) == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: run/metrics.jsonl: was removed or moved during the run; ")
    assert command(tmp_path, "resume=run") == 0
    assert [row["step"] for row in rows(tmp_path / "run") if "val/loss" in row] == [4, 6]


def test_a_run_whose_output_nobody_reads_ends_and_can_be_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, contextlib.redirect_stdout(stdout):
        assert command(tmp_path, *tiny(tmp_path, "run_dir=run")) == 141
    assert "Traceback" not in capfd.readouterr().err
    assert command(tmp_path, "resume=run") == 0


def test_a_finished_run_without_its_checkpoints_is_not_made_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, "run_dir=run")) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    assert command(tmp_path, "resume=run", "budget.steps=6") == 4
    assert "its checkpoints are gone" in capfd.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
