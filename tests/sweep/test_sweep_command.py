"""Sweeps as typed, with a process for each run; mistakes are found before any of them starts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock
from support import (
    command,
    config,
    is_complaint,
    losses,
    refuses,
    run_folders,
    summary,
    tiny,
    train,
)
from sweeping import Launcher
from sweeping import sweep as sweep_here
from torture import fingerprint

from gptattn.machine.lock import hold_lock
from gptattn.runs.folder import RunFolder
from gptattn.runs.planned_runs import SWEEP_LOCK
from gptattn.settings.compose import CONF

HOME = Path("outputs", "scratch")
TRAIN = str(CONF.parent / "train.py")

# A user's module, whose `how` says which run fails, and how.
MODULE = """
import os
import torch
from gptattn.attention import MultiHeadAttention

class Faulty(MultiHeadAttention):
    def __init__(self, d_in, d_out, context_length, num_heads, how, **common):
        super().__init__(d_in, d_out, context_length, num_heads, **common)
        self.how = how

    def forward(self, x, *args, **kwargs):
        if self.how == "raise" and x.device.type != "meta":
            return x @ torch.zeros(7, 5)
        if self.how == "kill" and x.device.type != "meta":
            os.kill(os.getpid(), 9)
        return super().forward(x, *args, **kwargs)
"""


def sweep(folder: Path, *overrides: str) -> int:
    return command(folder, "-m", *tiny(folder, "sweep.speed=false", *overrides))


def test_a_sweep_ends_with_the_speed_of_each_variant_measured_once(tmp_path, capfd):
    given = tiny(tmp_path, "attn=mha", "seed=1,2")
    assert command(tmp_path, "-m", *given) == 0
    out, err = capfd.readouterr()
    assert "measuring the speed of mha (interleaved, 1 thread)" in err
    assert "tokens/s" in out
    home = tmp_path / HOME
    (session,) = json.loads((home / "speed.json").read_text(encoding="utf-8"))
    assert [len(one["step"]) for one in session["variants"].values()] == [5]
    assert (home / "comparison" / "comparison.html").is_file()
    assert command(tmp_path, "-m", *given) == 0
    assert "measuring" not in capfd.readouterr().err


def test_each_combination_runs_in_its_own_process_with_unchanged_losses(tmp_path):
    both = tmp_path / "both"
    assert sweep(both, "attn=mha,gqa", "seed=2") == 0  # at the same time, if there are two cores
    runs = run_folders(both)
    assert [run.parent for run in runs] == [both / HOME] * 2
    assert {config(run)["choices"]["attn"]: config(run)["seed"] for run in runs} == {
        "gqa": 2,
        "mha": 2,
    }
    assert all((run / "console.log").read_text().endswith(f"logdir {HOME}\n") for run in runs)
    assert {path.name for path in both.iterdir()} == {"cache", "outputs", "text.txt"}
    one = train(tmp_path / "one", "attn=gqa", "seed=2", f"data.path={both / 'text.txt'}")
    (same,) = (run for run in runs if run.name.startswith("gqa_s2"))
    assert losses(one) == losses(same)


# Mistakes


@pytest.mark.parametrize(
    ("overrides", "sweeper", "said"),
    [
        (["seed=range(3,1)"], {}, "seed: no value"),
        (["trainer.devices=2"], {}, "trainer.devices: one process"),
        (["budget.accuracy=0.8,0.9"], {}, "budget.accuracy: task"),
        (["seed=1,2"], {"variants": ["attn=mha seed=1"]}, "seed: hydra."),
        ([], {"tune": {"lr": [1e-3], "seed": 1}}, "hydra.sweeper.tune.seed: 1"),
        (["optim.lr=1"], {"tune": {"lr": [1e-3], "seed": 0}}, "optim.lr: combined"),
        (["seed=1,2", "sweep.until=0.1"], {}, "sweep.until: 5 seeds"),
        (
            [],
            {"variants": ["attn=gqa attn.num_kv_heads=3"]},
            "attn.num_kv_heads: in hydra.sweeper.variants: attn=gqa attn.num_kv_heads=3",
        ),
    ],
)
def test_a_mistake_names_its_field(overrides, sweeper, said, tmp_path):
    with refuses(said):
        sweep_here(tmp_path, Launcher(lambda cfg: 2.0), *overrides, **sweeper)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "sweeper", "said"),
    [
        (["attn=mha,gqaa"], {}, "attn=gqaa: attn: 'gqaa' is unknown; did you mean gqa?"),
        (
            ["attn=mha,gqa", "attn.backend=sdpa", "accumulate=1,3"],
            {},
            "accumulate=3: accumulate: 3",
        ),
        (["attn=mha", "seed=1,-2"], {}, "seed=-2: seed: is -2"),
        (
            ["attn=mha", "position=learned,alibi", "part=[forget]"],
            {},
            "position=alibi: part: forget",
        ),
        (
            [],
            {"variants": ["attn=mha", "attn=gqa attn.num_kv_heads=3"]},
            "attn=gqa attn.num_kv_heads=3: attn.num_kv_heads",
        ),
    ],
)
def test_a_setting_that_only_some_runs_cannot_have_costs_only_those(
    overrides, sweeper, said, tmp_path, capfd
):
    launcher = Launcher(lambda cfg: 2.0)
    with refuses("sweep: refused"):
        sweep_here(tmp_path, launcher, *overrides, **sweeper)
    assert launcher.launched
    lines = [one for one in capfd.readouterr().err.splitlines() if one.startswith("refused: ")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"refused: {said}")


def test_a_second_sweep_in_the_folder_is_refused(tmp_path, capfd):
    with hold_lock(tmp_path / HOME / SWEEP_LOCK, "test", "busy"):
        assert sweep(tmp_path, "attn=mha,gqa") == 6
    assert is_complaint(capfd.readouterr().err, "hydra.sweep.dir: another process")


# Faults


@pytest.mark.slow
def test_a_run_that_fails_in_any_way_costs_only_itself(tmp_path, capfd, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "faulty_attention.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "own")
    # Unchecked: the check would run into the fault before the sweep starts.
    own = (
        "attn._target_=faulty_attention.Faulty",
        "allow_targets=[faulty_attention]",
        "checks=false",
    )
    assert sweep(tmp_path, *own, "+attn.how=kill,raise,not", "sweep.jobs=1") == 137
    *warnings, line = capfd.readouterr().err.splitlines()
    assert is_complaint(line, "sweep: 2 of 3")
    assert all(warning.startswith("warning: ") for warning in warnings)
    (done,) = run_folders(tmp_path)
    assert config(done)["attn"]["how"] == "not"
    killed, raised = (next((tmp_path / HOME).glob(f"*how-{how}*")) for how in ("kill", "raise"))
    failure = json.loads((killed / "failure.json").read_text())
    assert failure["exit"] == 137
    assert "SIGKILL" in failure["error"]
    failure = json.loads((raised / "failure.json").read_text())
    line = 1 + MODULE[: MODULE.index("torch.zeros")].count("\n")
    assert failure["exit"] == 1
    assert f"faulty_attention.py:{line}: RuntimeError: mat1 and mat2 shapes" in failure["error"]
    assert "Traceback" in (raised / "console.log").read_text()


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


LONG = ("budget.steps=60", "validation.count=30", "log_every=50", "model.dropout=0.1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGKILL, -9)],
)
def test_a_stopped_or_killed_sweep_leaves_no_process_and_goes_on(number, code, tmp_path, capfd):
    given = tiny(tmp_path, *LONG, "seed=1,2", "sweep.jobs=1")
    process = subprocess.Popen(
        [sys.executable, TRAIN, "-m", *given],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts background jobs, perhaps these tests, with SIGINT ignored: undo that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    home = tmp_path / HOME
    wait_for(lambda: process.poll() is not None or [*home.glob("mha_s2*/checkpoints/*.safet*")])
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert b"Traceback" not in err
    (begun,) = home.glob("mha_s2*")
    with FileLock(begun / ".lock", timeout=60):  # its process has ended too
        pass
    assert not RunFolder(begun).done
    capfd.readouterr()
    assert command(tmp_path, "-m", *given) == 0
    assert "2 runs, 1 already done, 1 to resume" in capfd.readouterr().out
    assert [summary(run)["seed"] for run in run_folders(tmp_path)] == [1, 2]
    assert "resumes after step" in (begun / "console.log").read_text(encoding="utf-8")
    assert fingerprint(begun) == fingerprint(train(tmp_path / "alone", *LONG, "seed=2"))


@pytest.mark.slow
def test_runs_can_be_sent_through_submitit(tmp_path, capfd):
    assert sweep(tmp_path, "launcher=submitit_local", "optim.lr=1e-3,1e30") == 5
    assert "1 of 2 runs failed" in capfd.readouterr().err
    (one,) = run_folders(tmp_path)
    assert config(one)["sweep"]["beside_others"]
