"""Run folders that ask for giant models, or hold another model's weights: none is built."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support import lone_checkpoint, train

from gptattn.errors import CheckpointError
from gptattn.runs.checkpoint import read_checkpoint, write_checkpoint
from gptattn.runs.load import load_run
from gptattn.settings.targets import ForeignTarget


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_a_file_larger_than_its_header_says_is_not_read(run: Path) -> None:
    with lone_checkpoint(run).open("ab") as file:
        file.truncate(10**11)  # a sparse file, which takes no space on the disk
    start = time.process_time()
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_run(run)
    assert time.process_time() - start < 1


def test_a_run_folder_allows_itself_no_package(run: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["attn"] = {"_target_": "subprocess.Popen", "args": ["mkdir", str(canary)]}
    config["allow_targets"] = ["subprocess"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ForeignTarget, match=r"attn\._target_: subprocess\.Popen is outside of"):
        load_run(run)
    assert not canary.exists()


HUGE = {
    "wide": {"model": {"d_model": 2**20}},
    "deep": {"model": {"num_layers": 1_000}},
    "deeper than any": {"model": {"num_layers": 1_001}},
    "many ids": {"model": {"vocab_size": 2**30}},
    "long": {"model": {"context_length": 2**30}},
    "long tables": {
        "position": {"_target_": "gptattn.position.rope.RotaryPosition", "base": 1e4},
        "model": {"context_length": 2**30, "d_model": 64},
    },
}


@pytest.mark.parametrize("form", ["checkpoint", "safetensors"])
@pytest.mark.parametrize("name", HUGE)
def test_a_config_of_a_giant_model_builds_none(name: str, form: str, run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for group, values in HUGE[name].items():
        config[group] = (config[group] | values) if group == "model" else values
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    if form == "safetensors":
        save_file({"w": torch.zeros(4)}, run / "model.safetensors")
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"lacks|the model's is|has an unknown|at most 1000"):
        load_run(run)
    # Listing the names and shapes takes about a millisecond per layer.
    assert time.process_time() - start < (5 if name == "deep" else 1)


def test_tables_that_no_weight_shows_are_counted_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path, "position=rope")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("context_length: 16", f"context_length: {2**28}")
    )
    monkeypatch.setattr("gptattn.runs.load.total_memory_bytes", lambda device: 10**10)
    # RoPE has two tables, each with 2^28 rows of 4 numbers of 8 bytes.
    with pytest.raises(CheckpointError, match=r"needs 17,179,\d+,\d+ bytes"):
        load_run(run)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.zeros(3, 5), r"is \[3, 5\], the model's is \[256, 16\]"),
        (torch.zeros(256, 16, dtype=torch.int64), "of torch.int64, the model.s is"),
        (torch.zeros(256, 16, dtype=torch.bool), "of torch.bool, the model.s is"),
        (None, "lacks 'token_embedding.weight'"),
    ],
)
def test_weights_of_another_shape_or_kind_are_refused(weight: Any, said: str, run: Path) -> None:
    file = lone_checkpoint(run)
    content = read_checkpoint(file)
    content["weights"]["token_embedding.weight"] = weight
    if weight is None:
        del content["weights"]["token_embedding.weight"]
    write_checkpoint(file, content)
    with pytest.raises(CheckpointError, match=said):
        load_run(run)


def test_a_safetensors_file_is_checked_by_its_header(run: Path) -> None:
    weights = dict(load_run(run).model.state_dict())
    save_file(weights | {"more": torch.zeros(10_000_000)}, run / "model.safetensors")
    with pytest.raises(CheckpointError, match="has an unknown 'more'"):
        load_run(run)
    save_file(weights, run / "model.safetensors")
    assert torch.equal(load_run(run).model.state_dict()["norm.bias"], weights["norm.bias"])
    (run / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}" * 9000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_run(run)
