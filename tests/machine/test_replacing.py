"""How a file is replaced: no name that could be guessed, no link, nothing left behind."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from building import SMALL, build_gpt, settings
from support import Call, command, run_folders, tiny, train

from gptattn.compare.files import write
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.errors import DiskError, RunFolderError
from gptattn.machine.disk import write_atomically
from gptattn.runs.folder import RunFolder
from gptattn.runs.save import save_model
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.processes import Outcome, Work, run_all
from gptattn.training.checkpoint_callback import AtomicCheckpointIO


def put(path: Path, content: bytes = b"new", root: Path | None = None) -> None:
    write_atomically(path, lambda file: file.write(content), root)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file elsewhere that must not be changed."""
    file = tmp_path / "elsewhere" / "layer_07.png"
    file.parent.mkdir()
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"
    assert list(file.parent.iterdir()) == [file]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", settings(*SMALL), build_gpt(vocab_size=256), ByteTokenizer())
    return tmp_path / "model"


# Names


def test_a_link_at_a_name_that_can_be_guessed_leads_nothing_elsewhere(
    precious: Path, model: Path, call: Call
) -> None:
    folder = model / "attention"
    folder.mkdir()
    for name in ("layer_00.png", "layer_01.png", "attention.html"):
        for number in range(os.getpid() - 5, os.getpid() + 5):
            (folder / f"{name}.{number}.part").symlink_to(precious)
        (folder / f"{name}").symlink_to(precious)
    assert call("attention_map", f"run={model}", "prompt=a list")[0] == 0
    assert not (folder / "attention.html").is_symlink()


def test_the_file_that_is_written_to_is_new_and_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    opened = os.open

    def noted(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_CREAT:
            seen.append((Path(path).name, flags))
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", noted)
    for _ in range(3):
        put(tmp_path / "page.html")
    assert len({name for name, _ in seen}) == len(seen) == 3
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW for _, flags in seen)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_who_may_read_a_file_is_for_the_umask_to_say(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        put(tmp_path / "a")
        write(tmp_path / "comparison.json", "{}")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {0o666 & ~umask}


# Links


@pytest.mark.parametrize("below", ["checkpoints", "checkpoints/deep", ""])
def test_a_folder_below_the_users_own_is_no_link(
    below: str, tmp_path: Path, precious: Path
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    if not below:  # the user's own folder may be a link
        run.rename(tmp_path / "disk")
        run.symlink_to(tmp_path / "disk")
        put(run / "checkpoints" / "deep" / "file", root=run)
        assert (tmp_path / "disk" / "checkpoints" / "deep" / "file").read_bytes() == b"new"
        return
    if below == "checkpoints":
        (run / below).rmdir()
    (run / below).symlink_to(precious.parent)
    with pytest.raises(DiskError, match=f"{run / below}: is a link, .*; remove it"):
        put(run / "checkpoints" / "deep" / "file", root=run)


def test_maps_of_attention_are_not_drawn_into_a_linked_folder(
    precious: Path, model: Path, call: Call
) -> None:
    (model / "attention").symlink_to(precious.parent)
    code, _, err = call("attention_map", f"run={model}", "prompt=a list")
    assert code == 7
    (line,) = err.splitlines()
    assert line.startswith(f"error: {model / 'attention'}: is a link, ")


def test_a_report_is_not_written_into_a_linked_folder(
    tmp_path: Path,
    precious: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from gptattn.cli.commands.compare import main

    run = train(tmp_path)
    events = precious.parent / "events.out.tfevents.1.gptattn-compare"
    for name in ("comparison", "comparison/tensorboard"):
        (run.parent / name).symlink_to(precious.parent)
        events.write_text("somebody else's")
        monkeypatch.setattr(sys, "argv", ["gptattn-compare", str(run.parent)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 7
        line = capfd.readouterr().err.splitlines()[-1]
        assert line.startswith(f"error: {run.parent / name}: is a link, ")
        assert events.read_text() == "somebody else's"
        events.unlink()
        (run.parent / name).unlink()
        (run.parent / "comparison").mkdir(exist_ok=True)


def test_outputs_may_be_a_link_to_another_disk(tmp_path: Path, call: Call) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    assert command(tmp_path, *tiny(tmp_path)) == 0
    (real,) = run_folders(tmp_path / "disk")
    run = tmp_path / "outputs" / real.relative_to(tmp_path / "disk")
    assert call("attention_map", f"run={run}", "prompt=a list")[0] == 0
    assert (real / "attention" / "attention.html").is_file()
    assert command(tmp_path, f"resume={run}", "budget.steps=6") == 0


@pytest.mark.parametrize("name", [".hydra", ".hydra/config.yaml"])
def test_hydra_writes_through_no_link_either(
    name: str, tmp_path: Path, precious: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(precious.parent if name == ".hydra" else precious)
    assert command(tmp_path, *tiny(tmp_path, "hydra.run.dir=run")) == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: run/{name}: is a link, ")


class Silent:
    def started(self, work: Work) -> None: ...
    def running(self, works: Any) -> None: ...
    def ended(self, work: Work, outcome: Outcome) -> None: ...


def test_a_sweep_adds_to_no_linked_file(tmp_path: Path, precious: Path) -> None:
    ledger, run = Ledger(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "console.log").symlink_to(precious)
    (outcome,) = run_all([Work(run, ["true"], [], 1.0)], 1, ledger, Silent())
    assert "console.log is a link or not a regular file; remove it" in outcome.reason
    (tmp_path / "ledger.jsonl").unlink()
    (tmp_path / "ledger.jsonl").symlink_to(precious)
    with pytest.raises(
        RunFolderError, match=r"ledger\.jsonl is a link or not a regular file; remove it"
    ):
        ledger.note("run", "running")


# Leftovers


HALF = """
import os, sys, signal
from pathlib import Path
from gptattn.machine.disk import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_amid(path: Path) -> Path:
    """Return the file that is left by a process killed while it writes `path`."""
    ended = subprocess.run([sys.executable, "-c", HALF, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = path.parent.glob(f"{path.name}.*.part")
    assert left.read_bytes() == b"half"
    return left


def test_what_a_killed_write_left_goes_with_the_next_of_that_name(tmp_path: Path) -> None:
    killed_amid(tmp_path / "page.html")
    (tmp_path / "page.html.4711.part").write_text("of an earlier version")
    others = [tmp_path / name for name in ("other.html.4711.part", "page.html.draft.part")]
    for other in others:
        other.write_text("theirs")
    put(tmp_path / "page.html")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "page.html", *others])


def test_the_token_cache_is_swept_of_what_killed_runs_left(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    name = f"{'a' * 64}-{'b' * 64}.tokens"
    killed_amid(cache / name)
    (cache / f"{name}.4711.part").write_bytes(b"of an earlier version")
    theirs = cache / "movie.mkv.4711.part"
    theirs.write_text("theirs")
    with (cache / f"{name}.0123456789abcdef.part").open("wb") as written:
        fcntl.flock(written, fcntl.LOCK_EX)  # as if another process were writing it
        train(tmp_path, "budget.steps=1")
        assert sorted(cache.glob("*.part")) == sorted([Path(written.name), theirs])
    command(tmp_path, *tiny(tmp_path, "budget.steps=1", "seed=2"))
    assert list(cache.glob("*.part")) == [theirs]


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, made = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        made.extend(file for file in tmp_path.glob("*.part") if not made)
        if len(made) == 1 and made[0].exists():
            made[0].unlink()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    put(tmp_path / "file")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert len(made) == 1


def test_a_killed_save_of_a_checkpoint_is_known_by_what_it_left(tmp_path: Path) -> None:
    folder, run = tmp_path / "checkpoints", RunFolder(tmp_path)
    AtomicCheckpointIO().save_checkpoint({"weights": {}, "step": 2}, folder / "step=2.safetensors")
    killed_amid(folder / "step=4.safetensors")
    (folder / "step=4.safetensors.sha256").write_text(f"{'0' * 64}  step=4.safetensors\n")
    assert [file.name for file in run.known_checkpoints()] == ["step=2.safetensors"]
    run.remove_leftovers()
    assert sorted(p.name for p in folder.iterdir()) == [
        "step=2.safetensors",
        "step=2.safetensors.sha256",
    ]
