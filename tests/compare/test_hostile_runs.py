"""`resume=` and the report on run folders made by others or holding odd files."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import SIX, begun, crash, once, steps_kept
from support import command, series, train
from tortures.bench import fingerprint

from gptattn.runs.checkpoint import read_checkpoint, write_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.runs.sweep_states import read_ledger

NEWEST = "checkpoints/step=4.safetensors"


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent folder of a run that died after step 5, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("dead")
    with pytest.MonkeyPatch.context() as patch:
        once(patch, "training_step", 5, crash)
        assert command(folder, *begun(folder)) == 1
    return folder


@pytest.fixture
def home(dead: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of `dead`. The test must take less than 10 s of CPU time."""
    shutil.copytree(dead, tmp_path, dirs_exist_ok=True)
    start = time.process_time()
    yield tmp_path
    assert time.process_time() - start < 10


def resumed(home: Path) -> int:
    return command(home, "resume=run", f"data.path={home / 'text.txt'}")


def edit(run: Path, change: Callable[[Any], object]) -> None:
    """Change the newest checkpoint, and its checksum accordingly."""
    content = read_checkpoint(run.parent / "run" / NEWEST)
    change(content)
    write_checkpoint(run / NEWEST, content)


def optimizer(content: Any) -> Any:
    return content["optimizer"]["token_embedding.weight"]


def own(content: Any) -> Any:
    return content["callbacks"]["Checkpoints"]


EDITS: dict[str, Callable[[Any], object]] = {
    "a small average": lambda c: optimizer(c).update(exp_avg=torch.zeros(1)),
    "an average that is none": lambda c: optimizer(c).update(exp_avg_sq=3),
    "an unknown parameter": lambda c: c["optimizer"].update(unknown={}),
    "no average": lambda c: optimizer(c).pop("exp_avg"),
    "no optimizer": lambda c: c.pop("optimizer"),
    "a million threads": lambda c: own(c).update(threads=10**6),
    "threads in words": lambda c: own(c).update(threads="one"),
    "no generators": lambda c: c.pop("generator"),
    "a short generator": lambda c: c["generator"].update(torch=torch.zeros(3)),
    "no loss since the row": lambda c: c.pop("since_row"),
    "no version": lambda c: c.pop("pytorch-lightning_version"),
    "no loops": lambda c: c.pop("loops"),
    "loops in words": lambda c: c["loops"].update(fit_loop="there"),
    "a step before the first": lambda c: c.update(global_step=-5),
    "another step": lambda c: c.update(global_step=3),
    "rows below none": lambda c: c["callbacks"]["MetricRows"].update(rows=-1),
    "a short twister": lambda c: c["generator"]["python"].update(words=torch.zeros(5)),
    "a clock that is none": lambda c: c["callbacks"]["StepClock"].update(seconds=float("nan")),
    "seconds in words": lambda c: c["callbacks"]["StepClock"].update(step_seconds="few"),
    "a completed budget in words": lambda c: c["callbacks"]["MetricRows"].update(
        completed=[{"budget": {"steps": "few"}, "step": 2, "metrics": {}}]
    ),
    "no callbacks": lambda c: c.update(callbacks=[1, 2]),
    "another weight": lambda c: c["weights"].popitem(),
}


@pytest.mark.parametrize("edited", EDITS)
def test_a_state_that_no_run_has_is_passed_over(
    edited: str, home: Path, whole: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    edit(home / "run", EDITS[edited])
    capfd.readouterr()
    assert resumed(home) == 0
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: checkpoint: step=4.safetensors ")
    assert warning.endswith("; using run/checkpoints/step=2.safetensors instead")
    assert fingerprint(home / "run") == whole("mha")


def test_what_lightning_cannot_restore_is_a_checkpoint_error(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # This belongs to Lightning: our own checks do not look at it.
    edit(home / "run", lambda c: c["loops"]["fit_loop"].update({"epoch_loop.state_dict": "words"}))
    assert resumed(home) == 4
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "error: checkpoint: run/checkpoints/step=4.safetensors cannot be resumed from"
    )


def test_a_checkpoint_of_any_size_is_refused_by_its_size(
    home: Path, whole: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    with (home / "run" / NEWEST).open("ab") as file:
        file.truncate(100 * 10**9)  # sparse, so it takes no disk; reading it would take minutes
    assert resumed(home) == 0
    assert (
        "step=4.safetensors cannot be read (it is not a complete safetensors file"
        in capfd.readouterr().err
    )
    assert fingerprint(home / "run") == whole("mha")


ODD: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a pipe for a sum": (f"{NEWEST}.sha256", os.mkfifo),
    "zeros without end for a sum": (f"{NEWEST}.sha256", lambda p: p.symlink_to("/dev/zero")),
    "a pipe for a checkpoint": (NEWEST, os.mkfifo),
    "a pipe for a summary": ("summary.json", os.mkfifo),
    "a folder named as a later checkpoint": ("checkpoints/step=99.safetensors", Path.mkdir),
    "a folder named as a leftover": ("checkpoints/step=9.safetensors.1.part", Path.mkdir),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_files_in_a_run_are_not_waited_for(
    odd: str, home: Path, whole: Callable[[str], str]
) -> None:
    name, make = ODD[odd]
    (home / "run" / name).unlink(missing_ok=True)
    make(home / "run" / name)
    assert resumed(home) == 0
    assert fingerprint(home / "run") == whole("mha")


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_written_to_is_no_link_and_no_pipe(
    name: str, kind: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    precious = home / "precious"
    precious.write_text("mine")
    file = home / "run" / name
    file.unlink()
    {"link": lambda: file.symlink_to(precious), "pipe": lambda: os.mkfifo(file)}.get(
        kind, file.mkdir
    )()
    code = resumed(home)
    assert precious.read_text() == "mine"
    if (name, kind) == ("metrics.jsonl", "link"):
        # The rows behind the link are not the run's; a new file replaces the link.
        assert code == 0
        assert not file.is_symlink()
        return
    assert code == 6
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: run: ")
    assert line.endswith("remove it")


def test_only_our_own_leftovers_are_removed(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    theirs = ["movie.mkv.part", "notes.part", "letter.txt.12.part"]
    ours = ["config.yaml.12.part", "summary.json.3.part"]
    for name in theirs + ours:
        (home / "run" / name).write_text("half")
    assert resumed(home) == 0
    assert {p.name for p in (home / "run").glob("*.part")} == set(theirs)
    new = tmp_path_factory.mktemp("new")
    (new / "run").mkdir()
    (new / "run" / "movie.mkv.part").write_text("half")
    assert command(new, *begun(new)) == 0
    assert (new / "run" / "movie.mkv.part").exists()


def test_a_sum_of_a_save_that_goes_on_is_no_damage(home: Path) -> None:
    checkpoints = home / "run" / "checkpoints"
    (checkpoints / "step=6.safetensors.sha256").write_text(f"{'0' * 64}  step=6.safetensors\n")
    assert RunFolder(home / "run").known_checkpoints()[0].name == "step=6.safetensors"
    (checkpoints / "step=6.safetensors.77.part").touch()
    assert RunFolder(home / "run").known_checkpoints()[0].name == "step=4.safetensors"


@pytest.mark.parametrize("nth", [1, 2])
def test_a_save_that_failed_leaves_no_trace(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Callable[[str], str]
) -> None:
    fsync, seen = os.fsync, []

    def full(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if ".safetensors." in name and ".sha256" not in name:
            seen.append(name)
            if len(seen) == nth:
                raise OSError(28, os.strerror(28))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert command(tmp_path, *begun(tmp_path)) == 7
    monkeypatch.undo()
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == ({"step=2.safetensors", "step=2.safetensors.sha256"} if nth == 2 else set())
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == whole("mha")


def test_lost_rows_are_not_made_up_for_by_later_ones(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = home / "run" / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    before = [json.loads(line)["step"] for line in lines]
    lost = next(i for i, step in enumerate(before) if step == 2)
    file.write_text("".join(lines[:lost] + lines[lost + 1 :]), encoding="utf-8")
    once(monkeypatch, "training_step", 5, crash)
    assert resumed(home) == 1
    err = capfd.readouterr().err
    assert "warning: metrics.jsonl: 1 rows written before step 4 are missing" in err
    monkeypatch.undo()
    # The next checkpoint records the rows that are left.
    assert steps_kept(home / "run")[0] == "step=4.safetensors"
    assert resumed(home) == 0
    steps = [step for step, _ in series(home / "run", "train/loss")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6


def test_a_ledger_of_somebody_elses_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"run": [], "state": "failed"}\n{"run": "a"}\n[1]\n')
    assert list(read_ledger(tmp_path)) == [{"run": "a"}]
    (tmp_path / "ledger.jsonl").unlink()
    os.mkfifo(tmp_path / "ledger.jsonl")
    assert list(read_ledger(tmp_path)) == []


def test_a_limit_without_end_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, *begun(tmp_path, "hang_seconds=1e10")) == 2
    assert "error: hang_seconds: 10000000000.0 is too large" in capfd.readouterr().err


def test_a_text_that_has_moved_can_be_named_on_resume(
    home: Path, dead: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = dead / "text.txt"
    moved = text.rename(dead / "elsewhere.txt")
    try:
        assert command(home, "resume=run") == 3
        assert "; if the text has moved, add data.path=" in capfd.readouterr().err
    finally:
        moved.rename(text)


def test_a_finished_run_is_read_while_nothing_is_wrong(tmp_path: Path) -> None:
    run = train(tmp_path, *SIX)
    assert command(tmp_path, "resume=run") == 0
    assert steps_kept(run) == ["step=6.safetensors", "step=4.safetensors"]
