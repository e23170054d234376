"""A disk that refuses: whole files or none, and one line with the path and the bytes needed."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import command, tiny, train

from gptattn.errors import DiskError
from gptattn.machine.disk import (
    Part,
    check_room,
    free_bytes,
    replacing,
    write_atomically,
    writing,
)
from gptattn.training.checkpoint_callback import AtomicCheckpointIO


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


def left_free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=count, f_frsize=1))


def test_a_piece_that_is_refused_is_among_the_bytes_needed(tmp_path: Path) -> None:
    def fill(needed: int) -> None:
        with replacing(tmp_path / "a", None, needed) as file:
            file.writelines([b"12", memoryview(b"345")])
            file.file = SimpleNamespace(write=refusing(errno.ENOSPC))  # type: ignore[assignment]
            file.write(np.arange(3, dtype=np.uint16).data)

    for needed, told in ((7, "11"), (1000, "1,000")):
        with pytest.raises(DiskError, match=f"; at least {told} bytes are needed and "):
            fill(needed)
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_before_its_size_is_known_asks_for_room_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", refusing(errno.ENOSPC))
    with pytest.raises(DiskError, match=r"/a: No space left on device; make room$"):
        write_atomically(tmp_path / "a", lambda file: file.write(b"x"))


def test_a_file_may_be_named_after_what_was_written(tmp_path: Path) -> None:
    with replacing(tmp_path / "unnamed") as file:
        file.write(b"content")
        file.path = tmp_path / "named"
    assert [each.name for each in tmp_path.iterdir()] == ["named"]
    assert file.path.read_bytes() == b"content"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_disk_that_is_full_says_what_it_would_have_taken() -> None:
    full = Path("/dev/full")
    with pytest.raises(DiskError) as refused, writing(full, lambda: 1234), full.open("wb") as file:
        file.write(b"x")
    reason, bytes_ = str(refused.value).split("; ")
    assert reason == "/dev/full: No space left on device"
    assert re.fullmatch(r"at least 1,234 bytes are needed and [\d,]+ are free, make room", bytes_)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_disk_that_may_not_be_written_is_told_from_a_full_one(number: int) -> None:
    with (
        pytest.raises(DiskError, match=r"; give another folder$"),
        writing(Path("there"), lambda: 10),
    ):
        refusing(number)()


def test_an_error_that_is_not_the_disks_stays_what_it_is() -> None:
    with pytest.raises(ConnectionError), writing(Path("there"), lambda: 10):
        raise ConnectionError(errno.ECONNRESET, "reset")


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_refused_checkpoint_leaves_what_was_there_and_says_its_size(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(5000.0)
    checkpoint = {"weights": {"weight": weight}, "optimizer": [weight.clone()], "step": 3}
    io, path = AtomicCheckpointIO(), tmp_path / "step=3.safetensors"
    io.save_checkpoint(checkpoint, path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    owner: Any = os if at == "fsync" else Path
    monkeypatch.setattr(owner, at, refusing(errno.ENOSPC))
    with pytest.raises(DiskError) as refused:
        io.save_checkpoint(checkpoint, path)
    # The checksum file is the first to be written.
    assert refused.value.field == f"{path}.sha256"
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before

    pieces = 0

    def write(part: Part, data: Any) -> int:
        nonlocal pieces
        pieces += 1
        return part.file.write(data) if pieces == 1 else refusing(errno.ENOSPC)()

    monkeypatch.setattr(Part, "write", write)
    with pytest.raises(DiskError) as refused:
        io.save_checkpoint(checkpoint, path)
    assert refused.value.field == str(path)
    # Two tensors of 5,000 floats, whatever had been written when the disk was full.
    assert "; at least 40,000 bytes are needed and " in refused.value.message
    assert 40_000 < path.stat().st_size < 41_000
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file: Any) -> None:
        file.write(b"new")
        refusing(errno.ENOSPC)()

    with pytest.raises(DiskError, match="at least 3 bytes are needed"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The order matters after a power cut, which killing a process cannot imitate.
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def bare(path: Path) -> str:
        return re.sub(r"\.[0-9a-f]{16}\.part$", ".part", path.name)

    def noted_fsync(descriptor: int) -> None:
        calls.append(("fsync", bare(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def noted_replace(path: Path, target: Path) -> Path:
        calls.append((bare(path), target.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    AtomicCheckpointIO().save_checkpoint(
        {"weights": {}, "step": 3}, tmp_path / "step=3.safetensors"
    )
    sum_, whole = "step=3.safetensors.sha256.part", "step=3.safetensors.part"
    assert calls == [
        ("fsync", sum_),
        (sum_, "step=3.safetensors.sha256"),
        ("fsync", tmp_path.name),
        ("fsync", whole),
        (whole, "step=3.safetensors"),
        ("fsync", tmp_path.name),
    ]


def test_room_is_looked_for_where_the_folder_will_be(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    free = free_bytes(folder)
    assert free == free_bytes(tmp_path) > 0
    check_room(folder, 1)
    with pytest.raises(DiskError, match="are free; make room, or give another folder"):
        check_room(folder, 10**18)


def test_a_run_that_does_not_fit_is_refused_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "measured", "validation.count=1")
    measured = sum(file.stat().st_size for file in run.rglob("*.safetensors"))
    capfd.readouterr()
    arguments = [*tiny(tmp_path, "validation.count=1", "hydra.run.dir=run")]
    left_free(monkeypatch, 1_000_000)
    assert command(tmp_path, *arguments) == 7
    (line,) = capfd.readouterr().err.splitlines()
    match = re.match(r"error: run: ([\d,]+) bytes are needed and 1,000,000 are free; ", line)
    assert match is not None
    # A megabyte for rows and events, and three values for each parameter.
    needed = int(match.group(1).replace(",", "")) - 1_000_000
    assert 0.6 * measured < needed <= measured
    assert not (tmp_path / "run").exists()


def test_a_sweep_needs_room_for_all_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left_free(monkeypatch, 4_000_000)
    arguments = [*tiny(tmp_path, "checkpoint=false", "seed=range(5)"), "-m"]
    assert command(tmp_path, *arguments) == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: outputs/scratch: 5,000,000 bytes are needed and 4,000,000 are")
    assert not (tmp_path / "outputs").exists()


def test_a_full_disk_ends_a_run_with_the_row_that_it_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gptattn.training.recorder import RunRecorder

    class Short:
        """A file on a disk that takes the first ten bytes of a row, as a full one does."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            return self.file.write(data[:10])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    write_row = RunRecorder._write_row

    def full(self: RunRecorder, step: int | None, values: dict[str, Any]) -> None:
        if step == 3:
            self._rows = Short(self._rows)  # type: ignore[assignment]
        write_row(self, step, values)

    monkeypatch.setattr(RunRecorder, "_write_row", full)
    assert command(tmp_path, *tiny(tmp_path, "hydra.run.dir=run")) == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(
        r"error: \S+/run/metrics\.jsonl: No space left on device; at least \d+ bytes are n", line
    )
    monkeypatch.undo()
    assert command(tmp_path, "resume=run") == 0
