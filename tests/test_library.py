"""gptattn from Python: docs/library.md is right, and its runs equal those of the command."""

import contextlib
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import assert_same
from runfolders import write_sweep
from support import command, config, losses, process_state, refuses, tiny

import gptattn
from gptattn.build.model import build_model
from gptattn.cli.commands import generate
from gptattn.errors import UserError
from gptattn.machine.console import make_printable
from gptattn.settings.compose import settings
from gptattn.training.run import train

PAGE = Path(__file__).parents[1] / "docs" / "library.md"
SIZES = {"d_model": 24, "num_heads": 4, "num_layers": 6, "context_length": 64}


@pytest.mark.slow
def test_the_pages_blocks_run_one_after_the_other(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with process_state():
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), known)
    # Only what the page's code prints: the training itself prints nothing.
    out, err = capfd.readouterr()
    assert re.findall(r"^(mha|gqa) \d\.\d+$", out, re.MULTILINE) == ["mha", "gqa"]
    assert "\nThe class" in out
    runs = known["runs"].sort_values("variant")
    assert [*zip(runs["variant"], runs["cost/kv_bytes_per_token"], strict=True)] == [
        ("gqa", 512),
        ("mha", 1024),
    ]
    assert err == ""
    assert {*known["curves"]["run"]} == {*runs["folder"]}
    assert repr(known["report"]).startswith("runs: 2 runs, 2 variants, 1 seed each")


def test_importing_the_package_comparing_and_checking_import_nothing_heavy(tmp_path):
    write_sweep(tmp_path / "runs", {"mha": [2.0, 2.1], "gqa": [2.2, 2.3]})
    code = (
        "import sys, gptattn\n"
        "print({'torch', 'pandas', 'hydra'} & {*sys.modules})\n"
        "gptattn.load_runs('runs'), gptattn.load_curves('runs'), repr(gptattn.compare('runs'))\n"
        "print({'torch', 'lightning'} & {*sys.modules})\n"
        "import gptattn.training.preflight, gptattn.sweep.plan\n"
        "print({'lightning'} & {*sys.modules})\n"  # it takes longer than torch to import
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["set()"] * 3


def test_curves_are_what_the_run_recorded(tmp_path):
    write_sweep(tmp_path, {"mha": [2.0]})
    curves = gptattn.load_curves(str(tmp_path))
    assert {*curves["run"]} == {str(tmp_path / "mha_s1")}
    val = curves[curves["metric"] == "val/loss"]
    # Losses at the validations of `curve_rows`: the last one's and the share of steps to come.
    assert [*val["step"]] == [20, 40, 60, 80, 100]
    assert [*val["value"]] == pytest.approx([2.8, 2.6, 2.4, 2.2, 2.0])
    train = curves[curves["metric"] == "train/loss"].set_index("step")["value"]
    assert train[50] == pytest.approx(2 + 2 * math.exp(-50 / 20))


def test_a_run_generates_what_the_command_does(runs, capsys):
    folder = runs("gqa")
    capsys.readouterr()
    generate.run([f"run={folder}", "prompt=The ", "tokens=20", "seed=3", "device=cpu"])
    by_command = capsys.readouterr().out
    found = gptattn.load_run(folder).generate("The ", tokens=20, seed=3)
    assert make_printable(found) == by_command.removesuffix("\n").removesuffix("\n")


@pytest.mark.parametrize("load", ["load_runs", "load_curves", "load_run", "compare"])
def test_a_folder_that_is_missing_is_named(load, tmp_path):
    with pytest.raises(UserError, match=str(tmp_path / "none")):
        getattr(gptattn, load)(tmp_path / "none")


def test_a_run_from_python_is_the_commands(tmp_path):
    given = tiny(tmp_path, "attn=gqa", "model.num_layers=2")
    assert command(tmp_path, *given, "run_dir=by_command") == 0
    cfg = settings(given)
    with process_state(), contextlib.chdir(tmp_path):
        train(cfg, "mine")
        with refuses("*: holds a run", 6):
            train(cfg, "mine")
    assert config(tmp_path / "mine") == config(tmp_path / "by_command")
    assert losses(tmp_path / "mine") == losses(tmp_path / "by_command") != []


def test_built_layers_are_those_of_the_recipes_model():
    given = [f"model.{name}={size}" for name, size in SIZES.items()]
    model = build_model(settings(["recipe=gemma3", *given]), vocab_size=5)
    layers = gptattn.build_layers(recipe="gemma3", **SIZES)
    assert {one.window for one in gptattn.build_layers("attn.window=5", attn="gqa", **SIZES)} == {5}
    for own, block in zip(layers, model.layers(), strict=True):
        own.load_state_dict(block.attention.state_dict())
        x = torch.randn(2, 13, 24)
        assert_same(own(x), block.attention(x))


@pytest.mark.parametrize(
    ("name", "said"), [("gema3", "did you mean gemma3?"), ("gemma4", "did you mean gemma")]
)
def test_a_mistake_in_what_to_build_is_the_commands_line(name, said):
    with refuses(f"recipe: {said}"):
        gptattn.build_layers(**SIZES | {"recipe": name})
