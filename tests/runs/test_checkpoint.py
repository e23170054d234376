"""Checkpoints are safetensors files: complete or absent, and loading one runs no code."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import command, lone_checkpoint, train

from gptattn.errors import CheckpointError, DiskError
from gptattn.machine.disk import write_atomically
from gptattn.runs.checkpoint import HEADER_KEY, read_checkpoint, write_checkpoint
from gptattn.runs.load import load_run
from gptattn.training.checkpoints import SafeCheckpointIO

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
STATE = {"weights": {"w": torch.arange(6.0)}, "step": 3}


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_what_was_saved_is_loaded_and_can_be_removed(tmp_path: Path) -> None:
    io, path = SafeCheckpointIO(), tmp_path / "new" / "a.safetensors"
    io.save_checkpoint(STATE, path)
    loaded = io.load_checkpoint(path)
    assert loaded["step"] == 3
    assert torch.equal(loaded["weights"]["w"], STATE["weights"]["w"])
    assert names(path.parent) == ["a.safetensors", "a.safetensors.sha256"]
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert names(path.parent) == []


def same(a: Any, b: Any) -> bool:
    """Return whether both are equal: structure, values, and of tensors dtype, shape and bits."""
    if isinstance(a, torch.Tensor):
        bits = [hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy()).digest() for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and bits[0] == bits[1]
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_every_dtype_shape_and_value_comes_back_to_the_bit(tmp_path: Path) -> None:
    bits = torch.randint(0, 256, (64,), dtype=torch.uint8)
    kinds = {str(d): bits.clone().view(d) for d in KINDS}
    shapes = {
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(3, 0),
        "matrix": torch.randn(3, 5),
        "flags": torch.tensor([True, False]),
    }
    content = {
        "optimizer": {"a/b.weight": {"exp_avg": torch.randn(2)}},
        "rest": [1, 0.1, 1e-310, None, True, "naïve π", {"x": [shapes["scalar"]]}],
        "weights": kinds | shapes,
    }
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, content)
    loaded = read_checkpoint(path)
    assert same(loaded["optimizer"], content["optimizer"])
    assert same(loaded["rest"], content["rest"])
    assert loaded["weights"].keys() == content["weights"].keys()
    assert all(same(loaded["weights"][n], t) for n, t in content["weights"].items())


def test_views_and_shared_tensors_are_written_with_their_values(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    weights = {"whole": whole, "turned": whole.T, "part": whole[:, 1:3], "again": whole}
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {"weights": weights})
    theirs = load_file(path)  # the library's own reader
    assert all(torch.equal(theirs[name], weight) for name, weight in weights.items())


def test_any_safetensors_reader_finds_the_weights_of_a_run_under_their_names(
    tmp_path: Path,
) -> None:
    run = train(tmp_path)
    file = lone_checkpoint(run)
    model, theirs = load_run(run).model, load_file(file)
    weights = model.state_dict()
    assert all(torch.equal(theirs[name], weight) for name, weight in weights.items())
    rest = theirs.keys() - weights.keys()
    assert "optimizer/blocks.0.mlp.up.weight/exp_avg_sq" in rest
    assert "generator/torch" in rest
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()[HEADER_KEY])
        aligned = [opened.get_tensor(name).data_ptr() for name in rest]
    assert header["global_step"] == 4
    assert all(address % 4 == 0 for address in aligned)


def test_a_failure_while_writing_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    SafeCheckpointIO().save_checkpoint(STATE, path)

    def fail(file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="No space"):
        write_atomically(path, fail)
    assert names(tmp_path) == ["a.safetensors", "a.safetensors.sha256"]
    assert read_checkpoint(path)["step"] == 3


def test_a_failure_to_reach_the_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    SafeCheckpointIO().save_checkpoint(STATE, path)

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError, match="Input/output"):
        SafeCheckpointIO().save_checkpoint({"weights": {}, "step": 4}, path)
    assert names(tmp_path) == ["a.safetensors", "a.safetensors.sha256"]
    assert read_checkpoint(path)["step"] == 3


class Payload:
    """Makes a folder when it is unpickled, which shows that it was."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def old_form(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    "save", [torch.save, old_form, lambda c, p: p.write_bytes(pickle.dumps(c))]
)
def test_a_pickle_is_refused_and_does_not_run(
    save: Callable[[Any, Path], object], tmp_path: Path
) -> None:
    path, canary = tmp_path / "a.safetensors", tmp_path / "canary"
    save({"weights": {}, "more": Payload(canary)}, path)
    with pytest.raises(CheckpointError, match="it is not a complete safetensors file") as error:
        SafeCheckpointIO().load_checkpoint(path, weights_only=False)
    assert not canary.exists()
    assert "\n" not in str(error.value)


def test_a_run_with_pickles_of_an_earlier_version_is_refused_and_left_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path)
    for file in (run / "checkpoints").iterdir():
        file.rename(str(file).replace(".safetensors", ".ckpt"))
    before = names(run / "checkpoints")
    assert command(tmp_path, f"resume='{run}'") == 4
    assert "step=4.ckpt is a pickle of an earlier version" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match="pickles are not read"):
        load_run(run)
    assert names(run / "checkpoints") == before


@pytest.mark.parametrize("kept", [0, 4, 10, 100, -1])
def test_a_truncated_checkpoint_is_reported_in_one_line(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.safetensors"
    SafeCheckpointIO().save_checkpoint(STATE, path)
    content = path.read_bytes()
    assert kept < len(content)
    path.write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read") as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("outline", "said"),
    [
        (None, "describes no run"),
        ("{", "Expecting"),
        ("[]", "is not a JSON object"),
        ('{"a": {"__tensor__": "x"}}', "names a tensor that the file lacks"),
        ('{"a": {"__tensor__": []}}', "names a tensor that the file lacks"),
        ("[" * 100_000, "."),
    ],
)
def test_a_header_that_is_not_ours_is_reported(
    outline: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    save_file(STATE["weights"], path, None if outline is None else {HEADER_KEY: outline})
    with pytest.raises(CheckpointError, match=said) as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value)


def test_a_missing_checkpoint_and_a_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path)
