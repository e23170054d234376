"""scripts/attention_map.py: what it writes and prints."""

import re
from pathlib import Path

import pytest
import torch
from building import SMALL, build_gpt, settings
from support import train

from gptattn.compare.finished_runs import read_runs
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.runs.load import load_run, save_model

pytestmark = pytest.mark.usefixtures("undrawn")


def save(folder: Path, *overrides: str) -> Path:
    """Write a folder as scripts/convert.py does: two layers of six heads, a context of 11."""
    model = build_gpt(*overrides, vocab_size=256, std=0.3)
    save_model(folder, settings(*SMALL, *overrides), model, ByteTokenizer())
    return folder


def read_table(out: str) -> dict[str, tuple[float, float]]:
    found = re.findall(r"^ *(\d+|even) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    return {name: (float(entropy), float(sink)) for name, entropy, sink in found}


@pytest.mark.parametrize(
    "variant", [pytest.param("differential", marks=pytest.mark.slow), "cross_layer"]
)
def test_a_variant_is_drawn(variant, tmp_path, call):
    run = save(tmp_path / "run", f"attn={variant}")
    code, out, err = call("attention_map", f"run={run}", "prompt=naïve list", "device=cpu")
    assert (code, err) == (0, "")
    files = ["attention.html", "layer_00.png", "layer_01.png"]
    assert sorted(path.name for path in (run / "attention").iterdir()) == files
    for name in files:
        assert f"written: {run / 'attention' / name}" in out
    ids = torch.tensor([list("naïve list".encode())])
    maps = load_run(run).model.attention_weights(ids)
    means = read_table(out)
    for layer, w_BHTS in enumerate(maps):
        entropy = torch.distributions.Categorical(w_BHTS[:, :, 1:]).entropy().mean().item()
        sink = w_BHTS[:, :, 1:, 0].mean().item()
        assert means[str(layer)] == pytest.approx((entropy, sink), abs=6e-4)
    assert set(means) == {"0", "1", "even"}
    one = tmp_path / "one"
    ask = ("attention_map", f"run={run}", "prompt=naïve list", "layer=1", f"out={one}")
    assert read_table(call(*ask)[1]).keys() == {"1", "even"}
    assert sorted(path.name for path in one.iterdir()) == ["attention.html", "layer_01.png"]


def test_a_single_token_of_a_run_has_a_map_and_no_figures(tmp_path, call):
    run = train(tmp_path, "attn=gqa")
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    code, out, _ = call("attention_map", f"run={run}", "prompt=a")
    assert code == 0
    assert before == {f: f.read_bytes() for f in before}
    page = (run / "attention" / "attention.html").read_text(encoding="utf-8")
    assert f"<title>Attention of {run.name}</title>" in page
    assert "entropy –<br>sink –" in page  # noqa: RUF001
    assert "nan" not in out
    assert read_runs([run])[0][0].folder == run


def test_a_run_without_attention_weights_is_named(tmp_path, call):
    run = save(tmp_path / "run", "attn=gated_deltanet")
    code, _, err = call("attention_map", f"run={run}", "prompt=a")
    said = "attn=gated_deltanet has no attention weights to show; give another run"
    assert (code, err) == (2, f"error: run: {said}\n")
