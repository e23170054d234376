"""Checkpoints are whole or absent, and reading one runs nothing."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gptattn.errors import CheckpointError, DiskError
from gptattn.machine.disk import write_atomically
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.training.checkpoint_callback import AtomicCheckpointIO

STATE = {"state_dict": {"w": torch.arange(6.0)}, "step": 3}


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_what_was_saved_is_loaded_and_can_be_removed(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "new" / "a.ckpt"
    io.save_checkpoint(STATE, path)
    loaded = io.load_checkpoint(path)
    assert loaded["step"] == 3
    assert torch.equal(loaded["state_dict"]["w"], STATE["state_dict"]["w"])
    assert names(path.parent) == ["a.ckpt", "a.ckpt.sha256"]
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert names(path.parent) == []


def test_a_failure_while_writing_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(STATE, path)

    def fail(file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="No space"):
        write_atomically(path, fail)
    assert names(tmp_path) == ["a.ckpt", "a.ckpt.sha256"]
    assert read_checkpoint(path)["step"] == 3


def test_a_failure_to_reach_the_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(STATE, path)

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError, match="Input/output"):
        AtomicCheckpointIO().save_checkpoint({"step": 4}, path)
    assert names(tmp_path) == ["a.ckpt", "a.ckpt.sha256"]
    assert read_checkpoint(path)["step"] == 3


class Payload:
    """Makes a file when it is unpickled without care."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def test_code_in_a_checkpoint_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path, canary = tmp_path / "a.ckpt", tmp_path / "canary"
    torch.save({"state_dict": {}, "more": Payload(canary)}, path)
    with pytest.raises(CheckpointError) as error:
        AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    assert not canary.exists()
    assert "\n" not in str(error.value)
    # The canary works: the same file, read without care, would have made it.
    torch.load(path, weights_only=False)  # noqa: TID251
    assert canary.exists()


@pytest.mark.parametrize("kept", [0, 10, 100, 600])
def test_a_truncated_checkpoint_is_reported_in_one_line(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(STATE, path)
    content = path.read_bytes()
    assert kept < len(content)
    path.write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=r"a\.ckpt cannot be read") as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value)


def test_a_missing_checkpoint_and_a_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path)
