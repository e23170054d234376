"""`gptattn-new`: what it writes passes its own test, and nothing is overwritten."""

import importlib
from pathlib import Path

import pytest
import torch
from support import refuses

from gptattn.build.model import build_model
from gptattn.cli.commands.new import write_variant
from gptattn.model.cost import measure_cost
from gptattn.model.gpt import GPT
from gptattn.settings.compose import settings


def test_a_new_variant_passes_its_own_test_and_stands_beside_mha(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_variant("my_rotary_attention")
    own = importlib.import_module("test_my_rotary_attention")
    tests = [one for name, one in vars(own).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()

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


def test_the_readme_shows_the_file_that_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_variant("mine")
    readme = Path(__file__).parents[2] / "README.md"
    assert f"```python\n{Path('mine.py').read_text()}```" in readme.read_text()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my-attention", "cannot name"),
        ("none", "cannot name"),  # its class would be None
        ("gqa", "taken"),
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
