"""gptattn-attention-map: what it writes and prints."""

import re
from pathlib import Path

import pytest
import torch
from building import SMALL, build_gpt, settings

from gptattn.data.tokenizer import ByteTokenizer
from gptattn.runs.load import load_run, save_model

pytestmark = pytest.mark.usefixtures("undrawn")


def save(folder: Path, *overrides: str) -> Path:
    """Write a folder as gptattn-convert does: two layers of six heads, a context of 11."""
    model = build_gpt(*overrides, vocab_size=256, std=0.3)
    save_model(folder, settings(*SMALL, *overrides), model, ByteTokenizer())
    return folder


def read_table(out: str) -> dict[str, tuple[float, float]]:
    found = re.findall(r"^ *(\d+|uniform) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    return {name: (float(entropy), float(sink)) for name, entropy, sink in found}


def test_every_layer_is_drawn(tmp_path, call):
    run = save(tmp_path / "run", "attn=cross_layer")
    code, out, err = call("attention_map", f"run={run}", "prompt=naïve list", "device=cpu")
    assert (code, err) == (0, "")
    files = [".gptattn-maps", "attention.html", "layer_00.png", "layer_01.png"]
    assert sorted(path.name for path in (run / "attention").iterdir()) == files
    ids = torch.tensor([list("naïve list".encode())])
    maps = load_run(run).model.attention_weights(ids)
    means = read_table(out)
    for layer, w_BHTS in enumerate(maps):
        entropy = torch.distributions.Categorical(w_BHTS[:, :, 1:]).entropy().mean().item()
        sink = w_BHTS[:, :, 1:, 0].mean().item()
        assert means[str(layer)] == pytest.approx((entropy, sink), abs=6e-4)
    assert set(means) == {"0", "1", "uniform"}
