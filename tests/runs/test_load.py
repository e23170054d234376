"""Reading a run back: its layers may differ, and its weights must be those of its model."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support import check_job, refuses, tiny, train

from gptattn.runs.checkpoint import read_checkpoint, weights_of, write_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_run
from gptattn.training.preflight import ROWS_BYTES, preflight


def test_the_room_for_layers_that_differ_is_that_of_their_own_weights(tmp_path):
    # Layers 0 and 1 have one key/value head for all query heads, layer 2 has one for each.
    cfg = check_job(tiny(tmp_path, "pattern=[mqa,mqa,mha]", "model.num_layers=3"))
    d, d_mlp, kv = 16, 64, [4, 4, 16]
    attention = sum(2 * (d + 1) * (d + width) for width in kv)  # q, out, k and v, with biases
    others = 3 * (2 * 2 * d + 2 * d * d_mlp + d_mlp + d) + 2 * d
    weights = attention + others + (256 + cfg.model.context_length) * d
    # Weights and AdamW's two averages in 4 bytes each; two validations leave two checkpoints.
    assert preflight(cfg).bytes_on_disk == ROWS_BYTES + 2 * 3 * 4 * weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"), "validation.count=1")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_a_run_folder_allows_itself_no_package(run, tmp_path):
    canary = tmp_path / "canary"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["attn"] = {"_target_": "subprocess.Popen", "args": ["mkdir", str(canary)]}
    config["allow_targets"] = ["subprocess"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with refuses("run: subprocess.Popen"):
        load_run(run)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("weight", "code"),
    [
        (torch.zeros(3, 5), 4),
        (torch.full((256, 16), torch.nan), 5),
        (None, 4),
    ],
)
@pytest.mark.parametrize("converted", [False, True])
def test_weights_of_another_model_are_refused(weight, code, converted, run):
    (file,) = RunFolder(run).known_checkpoints()
    content = read_checkpoint(file)
    del content["state_dict"]["model.token_embedding.weight"]
    if weight is not None:
        content["state_dict"]["model.token_embedding.weight"] = weight
    if converted:
        save_file(weights_of(content), run / "model.safetensors")
    else:
        write_checkpoint(file, content)
    with refuses("*: token_embedding.weight", code):
        load_run(run)


def test_a_run_without_a_checkpoint_or_with_a_damaged_record_is_refused(run):
    (file,) = RunFolder(run).known_checkpoints()
    file.unlink()
    with refuses("run: no checkpoint", 4):
        load_run(run)
    (run / "config.yaml").write_text("seed: 1\n")
    with refuses("*: config.yaml", 4):
        load_run(run)
