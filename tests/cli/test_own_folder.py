"""A variant in the folder where a command is typed: `mine.py` and `attn/mine.yaml`."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from support import command, config, refuses, run_folders, tiny
from sweeping import Launcher, sweep

from gptattn.cli.commands import check, generate
from gptattn.compare.finished_runs import read_runs
from gptattn.machine.source_code import is_unchanged
from gptattn.runs.load import load_run

SHIFTS = """
import torch
from torch import nn


class Shift(nn.Module):
    def __init__(self, d_in, d_out, share):
        super().__init__()
        self.share, self.out_proj = share, nn.Linear(d_in, d_out)

    def forward(self, x):
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return self.out_proj(x + self.share * before)
"""


def write_own(folder: Path, name: str, module: str = SHIFTS) -> Path:
    """A folder with a module of this name, and the YAML that chooses its class."""
    (folder / "attn").mkdir(parents=True)
    (folder / f"{name}.py").write_text(module)
    (folder / "attn" / f"{name}.yaml").write_text(f"_target_: {name}.Shift\nshare: 0.5\n")
    return folder


def test_the_two_files_work_where_the_command_is_typed_and_nowhere_else(tmp_path, capfd):
    here = write_own(tmp_path / "here", "own_shift")
    assert command(here, *tiny(tmp_path, "attn=own_shift", "run_dir=run")) == 0
    assert config(here / "run")["code_folders"] == [str(here)]
    assert command(here, f"resume={here / 'run'}", "budget.steps=6") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        generate.run([f"run={here / 'run'}", "prompt=a", "tokens=3"])
        assert "no cache: " in capfd.readouterr().err
        patch.chdir(tmp_path)  # above it: still files of whoever types
        assert load_run(here / "run").cfg.variant == "own_shift"
        (tmp_path / "else").mkdir()
        patch.chdir(tmp_path / "else")
        patch.delitem(sys.modules, "own_shift")
        patch.setattr(sys, "path", [one for one in sys.path if one != str(here)])
        with refuses("run: allow_targets=[own_shift]"):
            load_run(here / "run")
        assert load_run(here / "run", ["own_shift"]).cfg.variant == "own_shift"


@pytest.mark.slow
def test_a_config_dir_brings_its_modules_with_it_for_sweeps_too(tmp_path):
    there = write_own(tmp_path / "there", "own_shift_there")
    flags = (f"--config-dir={there}", "-m", *tiny(tmp_path, "attn=mha,own_shift_there"))
    assert command(tmp_path, *flags) == 0
    names = {folder.name.partition("_s1")[0] for folder in run_folders(tmp_path)}
    assert names == {"mha", "own_shift_there"}
    # Compared elsewhere in time, the module is found again: its code has not changed.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.delitem(sys.modules, "own_shift_there", raising=False)
        patch.setattr(sys, "path", [one for one in sys.path if one != str(there)])
        runs, _ = read_runs(run_folders(tmp_path))
        made = [run.provenance for run in runs if run.provenance is not None]
        assert len(made) == 2
        assert all(is_unchanged(one.code) for one in made)


BROKEN = SHIFTS.replace("x + self.share * before", "x + self.share * x.roll(-1, 1)")
RAISES = SHIFTS.replace("x + self.share * before", "x @ self.share")


def test_a_sweep_refuses_the_broken_variant_alone_and_trains_the_others(tmp_path, capfd):
    here, launcher = write_own(tmp_path / "here", "own_broken", BROKEN), Launcher(lambda cfg: 2.0)
    with refuses("sweep: refused"):
        sweep(here, launcher, "attn=mha,own_broken", "seed=1,2")
    assert launcher.launched == [("mha", 1), ("mha", 2)]
    lines = capfd.readouterr().err.splitlines()  # at the start, and again at the end
    assert sum(one.startswith("refused: attn=own_broken: attn: Shift") for one in lines) == 2


def test_an_error_in_the_user_s_file_is_theirs_with_line_and_shapes(tmp_path, capfd):
    here = write_own(tmp_path / "here", "own_raises", RAISES)
    assert command(here, *tiny(tmp_path, "attn=own_raises", "run_dir=run")) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    number = 1 + RAISES.splitlines().index("        return self.out_proj(x @ self.share)")
    assert line.startswith(f"error: own_raises.py:{number}: TypeError: ")
    assert "x [" in line
    assert not (here / "run").exists()


def test_the_check_prints_what_holds_and_refuses_what_no_checkpoint_keeps(tmp_path, capsys):
    kept = SHIFTS.replace("self.share * before", "self.share * self.scale * before")
    kept = kept.replace("nn.Linear(d_in, d_out)", "nn.Linear(d_in, d_out)\n        SCALE")
    sound = kept.replace("SCALE", "self.scale = nn.Parameter(torch.randn(1))")
    lost = kept.replace("SCALE", "self.scale = torch.randn(1)")
    for name, module in (("own_sound", sound), ("own_lost", lost)):
        write_own(tmp_path / name, name, module)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path / name)
            with nullcontext() if module is sound else refuses("attn: checkpoint"):
                check.check([f"attn={name}"])
    assert "own_sound passed every check" in capsys.readouterr().out
