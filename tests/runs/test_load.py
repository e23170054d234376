"""Reading a run back: its layers may differ, and each file's shapes are checked only once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import check_job, command, tiny, train

import gptattn.runs.load
from gptattn.model.cost import parameter_count
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.load import check_shapes, load_run
from gptattn.runs.save import save_model
from gptattn.training.preflight import ROWS_BYTES, preflight

# Layers 0 and 1 have one key/value head for all query heads, later layers one for each.
LAYERED = """from gptattn.attention import Attention, GroupedQueryAttention

def by_layer(
    d_in: int, d_out: int, context_length: int, num_heads: int, dropout: float, layer: int
) -> Attention:
    return GroupedQueryAttention(
        d_in, d_out, context_length, num_heads, dropout, num_kv_heads=1 if layer < 2 else num_heads
    )
"""
# The variant's YAML, without arguments of its own.
FILE = "_target_: layered_package.by_layer\n"


@pytest.fixture
def layered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides of a run with three layers whose attention differs."""
    (tmp_path / "layered_package.py").write_text(LAYERED)
    (tmp_path / "conf" / "attn").mkdir(parents=True)
    (tmp_path / "conf" / "attn" / "layered.yaml").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    return [
        f"hydra.searchpath=[file://{tmp_path / 'conf'}]",
        "attn=layered",
        "allow_targets=[layered_package]",
        "model.num_layers=3",
    ]


def test_layers_that_differ_are_trained_gone_on_with_and_read_back(
    layered: list[str], tmp_path: Path
) -> None:
    run = train(tmp_path, *layered)
    allowed = ["allow_targets=[layered_package]", f"data.path={tmp_path / 'text.txt'}"]
    assert command(tmp_path, f"resume='{run}'", "budget.steps=6", *allowed) == 0
    loaded = load_run(run, ["layered_package"])
    assert loaded.source.name == "step=6.safetensors"
    sizes = [parameter_count(block.attention) for block in loaded.model.layers()]
    # q, out and its bias have 2 x 16 x 16 + 16; keys and values are 4, 4 and 16 wide.
    assert sizes == [656, 656, 1040]
    kept = read_checkpoint(loaded.source)["weights"]
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, kept[name])
    save_model(tmp_path / "made", loaded.cfg, loaded.model, loaded.tokenizer)
    again = load_run(tmp_path / "made", ["layered_package"]).model
    assert torch.equal(again.state_dict()["norm.bias"], loaded.model.state_dict()["norm.bias"])


def test_the_room_for_layers_that_differ_is_that_of_their_own_weights(
    layered: list[str], tmp_path: Path
) -> None:
    cfg = check_job(tiny(tmp_path, *layered))
    d, d_mlp, kv = 16, 64, [4, 4, 16]
    attention = sum(2 * d * d + 2 * d * width + d for width in kv)  # q, out and its bias, k, v
    others = 3 * (2 * 2 * d + 2 * d * d_mlp + d_mlp + d) + 2 * d
    weights = attention + others + (256 + cfg.model.context_length) * d
    # Weights and AdamW's two averages in 4 bytes each; two validations leave two checkpoints.
    assert preflight(cfg).bytes_on_disk == ROWS_BYTES + 2 * 3 * 4 * weights


Counted = Callable[[], int]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Returns how often names and shapes have been compared so far."""
    seen: list[Path] = []

    def counted(own: Any, found: Any, source: Path) -> None:
        seen.append(source)
        check_shapes(own, found, source)

    monkeypatch.setattr(gptattn.runs.load, "check_shapes", counted)
    return lambda: len(seen)


def test_the_shapes_of_a_checkpoint_are_looked_at_once(tmp_path: Path, looks: Counted) -> None:
    run = train(tmp_path)
    assert looks() == 0
    loaded = load_run(run)
    assert looks() == 1
    save_model(tmp_path / "made", loaded.cfg, loaded.model, loaded.tokenizer)
    load_run(tmp_path / "made")
    assert looks() == 2
    assert command(tmp_path, f"resume='{run}'", "budget.steps=6") == 0
    assert looks() == 3
