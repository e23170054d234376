"""`gptattn-new`: what it writes is causal and learns, and nothing is overwritten."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from gptattn.cli.commands.new import write_variant
from gptattn.errors import ConfigError


def test_a_new_variant_is_causal_takes_its_yaml_and_passes_its_own_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_variant("my_new_attention")
    spec = yaml.safe_load(Path("attn/my_new_attention.yaml").read_text())
    assert spec.pop("_target_") == "my_new_attention.MyNewAttention"
    monkeypatch.syspath_prepend(tmp_path)
    from my_new_attention import MyNewAttention  # type: ignore[import-not-found]

    # The rest of its arguments are those that the model fills.
    sizes = {"d_in": 15, "d_out": 15, "num_heads": 3, "dropout": 0.0}
    assert [*inspect.signature(MyNewAttention).parameters] == [*sizes, *spec]
    attention = MyNewAttention(**sizes, **spec).double()
    x = torch.randn(1, 7, 15, dtype=torch.float64, requires_grad=True)
    y = attention(x)
    assert y.shape == x.shape
    for t in range(7):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        assert gradient[0].any(dim=-1).tolist() == [u <= t for u in range(7)]

    monkeypatch.undo()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "test_my_new_attention.py"], cwd=tmp_path, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my-attention", "cannot name a Python module"),
        ("none", "cannot name a Python module"),  # its class would be None
        ("gqa", "is on the menu"),
        ("json", "is the name of an installed Python module"),
        ("mine_too", r"would overwrite attn/mine_too.yaml; give another"),
    ],
)
def test_a_name_that_is_taken_is_refused_and_nothing_is_written(name, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attn").mkdir()
    (tmp_path / "attn" / "mine_too.yaml").write_text("kept")
    with pytest.raises(ConfigError, match=rf"^name: '{name}' {why}"):
        write_variant(name)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mine_too.yaml"]
    assert (tmp_path / "attn" / "mine_too.yaml").read_text() == "kept"
