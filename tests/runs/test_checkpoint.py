"""Checkpoints are safetensors files: complete or absent, and loading one runs no code."""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import refuses, train
from torch.utils._pytree import tree_map

from gptattn.runs.checkpoint import HEADER_KEY, read_checkpoint, write_checkpoint
from gptattn.runs.load import load_run

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
CONTENT = {"state_dict": {"model.w": torch.arange(6.0)}, "global_step": 3}


def describe(leaf: Any) -> tuple[Any, ...]:
    """A value with its type; of a tensor its dtype, shape and bits."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.shape, leaf.reshape(-1).view(torch.uint8).tolist()
    return type(leaf), leaf


def test_every_dtype_shape_and_value_comes_back_to_the_bit(tmp_path):
    bits = torch.randint(0, 256, (64,), dtype=torch.uint8)
    weights = {f"model.{d}": bits.clone().view(d) for d in KINDS} | {
        "model.scalar": torch.tensor(-0.0),
        "model.empty": torch.zeros(3, 0),
        "model.flags": torch.tensor([True, False]),
    }
    content = {
        "state_dict": weights,
        "optimizer_states": [{"state": {0: {"exp_avg": torch.randn(2)}, 1: {}}}],
        "rest": [1, 0.1, 1e-310, None, True, "naïve π", {"x": [torch.randn(3, 5)]}],
    }
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, content)
    assert tree_map(describe, read_checkpoint(path)) == tree_map(describe, content)
    assert [*tmp_path.iterdir()] == [path]


def test_views_and_shared_tensors_are_written_with_their_values(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    weights = {"whole": whole, "turned": whole.T, "part": whole[:, 1:3], "rows": whole[1:]}
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {"state_dict": weights | {"again": whole}})
    theirs = load_file(path)  # the library's own reader
    assert all(torch.equal(theirs[name], weight) for name, weight in weights.items())


def test_any_safetensors_reader_finds_a_runs_weights_under_their_names(tmp_path):
    loaded = load_run(train(tmp_path, "validation.count=1"))
    theirs, weights = load_file(loaded.source), loaded.model.state_dict()
    assert all(torch.equal(theirs[name], weight) for name, weight in weights.items())
    rest = theirs.keys() - weights.keys()
    assert "optimizer_states/0/state/0/exp_avg_sq" in rest
    assert "run/generators/torch" in rest
    with safe_open(loaded.source, framework="pt") as opened:
        assert json.loads(opened.metadata()[HEADER_KEY])["global_step"] == 4


@pytest.mark.usefixtures("small_files_only")
def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, CONTENT)
    with refuses("*: make room", 7):
        write_checkpoint(path, {"state_dict": {"w": torch.zeros(10_000)}})
    assert [*tmp_path.iterdir()] == [path]
    assert read_checkpoint(path)["global_step"] == 3


def test_damage_is_one_line(tmp_path):
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, CONTENT)
    whole = path.read_bytes()
    altered = [bytearray(whole), bytearray(whole)]
    altered[0][-1] ^= 1  # a weight
    altered[1][whole.index(b"global_step") + 14] ^= 1
    for damaged in [b"", whole[:100], whole[:-1], *altered]:
        path.write_bytes(damaged)
        with refuses("*: a.safetensors", 4):
            read_checkpoint(path)


def test_what_is_no_checkpoint_is_one_line(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "weights")
    torch.save(CONTENT, tmp_path / "pickle")
    for name, word in (("weights", "header"), ("pickle", "complete"), ("none", "not exist")):
        with refuses(f"*: {word}", 4):
            read_checkpoint(tmp_path / name)
    with refuses("*: cannot be read", 4):
        read_checkpoint(tmp_path)
