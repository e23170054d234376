"""A run whose folder or files vanish, or whose output nobody reads, ends with one line."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from interrupted import begun, once
from support import command, rows, tiny, train

from gptattn.errors import DiskError
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_config
from gptattn.training.recorder import RunRecorder


def remove(run: Path) -> None:
    # Renamed first: TensorBoard's thread could add a file to the folder while it is being emptied.
    shutil.rmtree(run.rename(run.with_name("trash")))


TAKEN: dict[str, Callable[[Path], object]] = {
    "removed": remove,
    "moved": lambda run: run.rename(run.with_name("moved")),
}


@pytest.mark.parametrize("log_every", [1, 1000])
@pytest.mark.parametrize("way", TAKEN)
def test_a_run_whose_folder_is_gone_ends_in_one_line_and_makes_no_other(
    way: str,
    log_every: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 3, lambda: TAKEN[way](run))
    assert command(tmp_path, *begun(tmp_path, f"log_every={log_every}")) == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {run}: the run's folder was removed or moved; ")
    assert not run.exists()
    monkeypatch.undo()
    if way == "moved":
        assert command(tmp_path, "resume=moved") == 0


def test_the_thread_that_writes_events_leaves_its_error_to_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    recorder = RunRecorder(RunFolder(tmp_path / "run"))
    recorder.log_metrics({"train/loss": 1.0}, 1)
    recorder._writer.flush()
    shutil.rmtree(tmp_path / "run")
    recorder._writer.add_scalar("train/loss", 2.0, 2)  # queued before the folder is checked again
    recorder._events().event_writer._async_writer._worker.join()
    with pytest.raises(DiskError, match="the run's folder was removed"):
        recorder.log_metrics({"train/loss": 3.0}, 3)
    recorder.close(done=False)
    assert capfd.readouterr() == ("", "")


def test_a_run_whose_rows_are_gone_ends_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run" / "metrics.jsonl"
    once(monkeypatch, "training_step", 3, file.unlink)
    assert command(tmp_path, *begun(tmp_path)) == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {file}: was removed or moved during the run; ")
    assert command(tmp_path, "resume=run") == 0
    assert [row["step"] for row in rows(tmp_path / "run") if "val/loss" in row] == [4, 6]


def test_a_run_whose_settings_were_removed_has_them_again_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run" / "config.yaml"
    kept: list[bytes] = []

    def remove() -> None:
        kept.append(file.read_bytes())
        file.unlink()

    once(monkeypatch, "training_step", 3, remove)
    assert command(tmp_path, *begun(tmp_path)) == 0
    assert [file.read_bytes()] == kept
    assert load_config(tmp_path / "run").seed == 1


# What is printed


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """stdout is a pipe whose reader has exited, as after `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, contextlib.redirect_stdout(stdout):
        yield


def test_a_run_whose_output_nobody_reads_ends_and_says_how_it_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with unread():
        assert command(tmp_path, *tiny(tmp_path, "hydra.run.dir=run")) == 141
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("; to resume: python train.py resume=run")


@pytest.mark.usefixtures("no_estimate")
def test_a_sweep_whose_output_nobody_reads_says_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_stages(*args: object) -> NoReturn:
        raise BrokenPipeError

    monkeypatch.setattr("gptattn.sweep.run_sweep._run_stages", run_stages)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        assert command(tmp_path, *tiny(tmp_path, "seed=1,2", "-m")) == 141
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "stopped: 0 of 2 runs are done; the same command runs the others"


@pytest.mark.parametrize("asked", ["--help", "--cfg=job"])
def test_help_that_nobody_reads_is_no_error(
    asked: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with unread():
        assert command(tmp_path, asked) == 141
    assert capfd.readouterr().err == ""


def test_a_report_that_nobody_reads_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gptattn.cli.commands.compare import main

    run = train(tmp_path)
    capfd.readouterr()
    for flag in ("--no-files", "--markdown"):
        monkeypatch.setattr(sys, "argv", ["gptattn-compare", str(run), flag])
        with unread(), pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("names", [("stdout",), ("stdout", "stderr")])
def test_a_run_without_output_trains(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        monkeypatch.setattr(sys, name, None)
    assert command(tmp_path, *tiny(tmp_path, "hydra.run.dir=run")) == 0
    for name in names:
        getattr(sys, name).close()
    assert [row["step"] for row in rows(tmp_path / "run") if "val/loss" in row] == [2, 4]
