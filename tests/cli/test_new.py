"""`gptattn-new`: what it writes passes its own test, and nothing is overwritten."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import yaml
from support import refuses

from gptattn.build.model import build_model
from gptattn.cli.commands.new import write_variant
from gptattn.model.cost import measure_cost
from gptattn.model.gpt import GPT
from gptattn.settings.compose import settings


def test_a_new_variant_takes_its_yaml_and_passes_its_own_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_variant("my_new_attention")
    spec = yaml.safe_load(Path("attn/my_new_attention.yaml").read_text())
    assert spec.pop("_target_") == "my_new_attention.MyNewAttention"
    monkeypatch.syspath_prepend(tmp_path)
    from my_new_attention import MyNewAttention

    # The rest of its arguments are those that the model fills.
    filled = ["d_in", "d_out", "num_heads", "dropout", "position"]
    assert [*inspect.signature(MyNewAttention).parameters] == [*filled, *spec]
    own = importlib.import_module("test_my_new_attention")
    tests = [one for name, one in vars(own).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_a_new_variant_stands_beside_mha_with_its_positions_and_its_flops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_variant("my_rotary_attention")

    def build(attn: str, *overrides: str) -> GPT:
        return build_model(settings([f"attn={attn}", "block=llama", *overrides]), 7)

    mine, mha = (build(name) for name in ("my_rotary_attention", "mha"))
    assert measure_cost(mine).flops_per_token == measure_cost(mha).flops_per_token
    ids = torch.arange(6)[None]
    without = build("my_rotary_attention", "position=none")
    without.load_state_dict(mine.state_dict())
    assert not torch.allclose(mine.eval()(ids), without.eval()(ids))
    with refuses("position: alibi"):
        build("my_rotary_attention", "position=alibi")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my-attention", "cannot name"),
        ("none", "cannot name"),  # its class would be None
        ("gqa", "menu"),
        ("json", "installed"),
        ("mine_too", "attn/mine_too.yaml"),
    ],
)
def test_a_name_that_is_taken_is_refused_and_nothing_is_written(name, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attn").mkdir()
    (tmp_path / "attn" / "mine_too.yaml").write_text("kept")
    with refuses(f"name: {why}"):
        write_variant(name)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mine_too.yaml"]
    assert (tmp_path / "attn" / "mine_too.yaml").read_text() == "kept"
