"""A variant that crashes, hangs or takes all the memory fails its own runs, and no others."""

import errno
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import safetensors
import torch
from interrupted import begun, once, steps_kept
from support import command, run_folders, tiny

import gptattn.cli.ending
import gptattn.sweep.estimate
import gptattn.sweep.processes
from gptattn.cli.ending import as_user_error
from gptattn.cli.main import check_job
from gptattn.errors import OutOfMemory
from gptattn.machine.signals import StopRequest
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.sweep_states import read_ledger
from gptattn.settings.config import TrainConfig
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import Plan, begun_runs
from gptattn.sweep.processes import Outcome, Work, memory_kills, run_all
from gptattn.sweep.run_processes import run_in_processes
from gptattn.training.checkpoint_callback import Checkpoints

MODULE = """
import ctypes
import torch
from gptattn.attention import MultiHeadAttention

class Faulty(MultiHeadAttention):
    def __init__(
        self, d_in, d_out, context_length, num_heads, out_proj, scale, window, backend, how
    ):
        super().__init__(d_in, d_out, context_length, num_heads)
        self.how = how
        if how == "refuse":
            raise RuntimeError("cannot be built")

    def forward(self, x, *args, **kwargs):
        out = super().forward(x, *args, **kwargs)
        if self.how == "raise":
            return out @ torch.zeros(7, 5)
        if self.how == "crash":
            ctypes.string_at(0)
        return out
"""
RAISES = 1 + MODULE[: MODULE.index("torch.zeros")].count("\n")


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that select a user's faulty module, importable here and in child processes."""
    home = tmp_path / "own"
    home.mkdir()
    (home / "faulty_attention.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(home)
    monkeypatch.setenv("PYTHONPATH", str(home), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "faulty_attention", raising=False)
    return ["attn._target_=faulty_attention.Faulty", "allow_targets=[faulty_attention]"]


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path / "in"))


class Silent:
    def started(self, work: Work) -> None: ...
    def running(self, works: Sequence[Work]) -> None: ...
    def ended(self, work: Work, outcome: Outcome) -> None: ...


def ends(folder: Path) -> list[tuple[str, int]]:
    begun = ("submitted", "running")
    return [(e["state"], e["exit"]) for e in read_ledger(folder) if e["state"] not in begun]


def work(folder: Path, code: str) -> Work:
    return Work(
        folder, [sys.executable, "-c", f"import os; os.chdir({str(folder)!r})\n{code}"], [], 1.0
    )


# A user's own module


@pytest.mark.slow
def test_a_variant_that_crashes_or_raises_or_cannot_be_built_costs_its_own_runs_alone(
    faulty: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = [*faulty, "+attn.how=crash,raise,refuse,not", "sweep.jobs=1", "checkpoint=false"]
    assert command(tmp_path, "-m", *tiny(tmp_path, *own)) == 1
    out = capfd.readouterr().out
    assert "4 to run, one after the other; no time estimate" in out
    home = tmp_path / "outputs" / "scratch"
    assert ends(home) == [("failed", -signal.SIGSEGV), ("failed", 1), ("failed", 1), ("done", 0)]
    reason, built = [e["reason"] for e in read_ledger(home) if e.get("exit") == 1]
    assert built.endswith(": RuntimeError: cannot be built")
    file = os.path.relpath(tmp_path / "own" / "faulty_attention.py", tmp_path)
    assert reason.startswith(f"{file}:{RAISES}: RuntimeError: mat1 and mat2 shapes")
    assert "report" not in reason
    assert "killed by SIGSEGV" in out
    (raised,) = [f for f in home.glob("*/console.log") if "mat1 and mat2" in f.read_text()]
    assert "Traceback" in raised.read_text()
    assert len(run_folders(tmp_path)) == 1


@pytest.mark.parametrize(
    ("code", "line", "said"),
    [
        ("import torch\n\nhalf = (\n", 3, "SyntaxError: '(' was never closed"),
        ("\nwidth = undefined\n", 2, "NameError: name 'undefined' is not defined"),
        (
            "def Faulty(out_proj, scale, window, backend):\n    return {}[backend]\n",
            2,
            "KeyError: 'sdpa'",
        ),
    ],
)
def test_an_error_of_a_users_module_names_its_file_and_line(
    code: str,
    line: int,
    said: str,
    faulty: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own" / "faulty_attention.py").write_text(code, encoding="utf-8")
    for flags in ([], ["-m"], ["--debug"]):
        assert command(tmp_path, *flags, *tiny(tmp_path, *faulty)) == 1
        *before, last = capfd.readouterr().err.splitlines()
        assert last.startswith(f"error: own/faulty_attention.py:{line}: {said}")
        assert last.endswith("; --debug shows the traceback") == (flags != ["--debug"])
        assert bool(before) == (flags == ["--debug"])
    assert not (tmp_path / "outputs").exists()


def test_a_bug_that_may_be_a_users_is_not_said_to_be_ours_for_sure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for packages, said in (
        ([], "a; please"),
        (["x.y", "z"], "a; unless it comes from x.y, z, please"),
    ):
        arguments = ["train.py", f"allow_targets=[{','.join(packages)}]"]
        monkeypatch.setattr(sys, "argv", arguments)
        assert gptattn.cli.ending.report(IndexError("a")) == 1
        last = capfd.readouterr().err.splitlines()[-1]
        assert last == f"error: internal: IndexError: {said} report it"


# Memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("std::bad_alloc"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_what_is_raised_for_want_of_memory_is_out_of_memory(error: Exception) -> None:
    known = as_user_error(error)
    assert isinstance(known, OutOfMemory)
    assert known.exit_code == 8
    with pytest.raises(type(error)), Checkpoints(None, StopRequest(), {}).restoring(Path("x")):
        raise error


def test_out_of_memory_is_no_mistake_of_the_run_or_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def greedy() -> None:
        torch.empty(25_000_000_000_000)  # raises torch's own error

    once(monkeypatch, "training_step", 4, greedy)
    assert command(tmp_path, *begun(tmp_path)) == 8
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: memory: too little for this run; ")
    assert steps_kept(tmp_path / "run") == ["step=4.safetensors", "step=2.safetensors"]
    Ledger(tmp_path).note("run", "failed", exit=8)
    assert list(begun_runs(tmp_path).values()) == [[tmp_path / "run"]]

    def short(*args: object, **kwargs: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(safetensors, "safe_open", short)
    with pytest.raises(MemoryError):
        read_checkpoint(tmp_path / "run" / "checkpoints" / "step=4.safetensors")


def test_a_kill_by_the_kernel_for_want_of_memory_is_told_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 3\noom_kill_x 5\n")
    assert memory_kills(tmp_path / "vmstat") == 3
    assert memory_kills(tmp_path / "none") == 0
    kill = "os.kill(os.getpid(), 9)"
    for after, expected in ((3, -9), (4, 8)):
        counts = iter([3, after])
        monkeypatch.setattr(gptattn.sweep.processes, "memory_kills", lambda c=counts: next(c))
        (outcome,) = run_all([work(tmp_path / "a", kill)], 1, Ledger(tmp_path), Silent())
        assert (outcome.exit, outcome.out_of_memory) == (expected, expected == 8)


# Runs in place of training. `other` ends once `needy` has failed; `needy` succeeds only when it is
# resumed after that; all others fail.
TRAINED = """
import json, sys
from pathlib import Path
name, home = sys.argv[1], Path("..")
Path("config.yaml").touch()
loss = {"metrics": {"val/loss": 2.0}}
if name == "other":
    Path("here").touch()
    while not (home / "needy" / "failed").exists(): pass
    Path("here").unlink()
elif name != "needy" or "resume" not in sys.argv or (home / "other" / "here").exists():
    Path("failed").touch()
    print("error: memory: too little")
    sys.exit(8)
Path("summary.json").write_text(json.dumps(loss))
"""


def test_a_run_out_of_memory_is_tried_once_more_alone(
    cfg: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("gptattn.sweep.sharing.usable_cpus", lambda: 4)
    cfg = replace(cfg, sweep=replace(cfg.sweep, jobs=4))
    home = tmp_path / "sweep"
    home.mkdir()
    plans = [Plan([], cfg, home / name) for name in ("needy", "other", "greedy")]
    # Its folder will hold a begun run without a checkpoint, which cannot be resumed.
    plans.append(Plan([], replace(cfg, checkpoint=False), home / "once"))

    def of(plan: Plan) -> list[str]:
        resume = ["resume"] if plan.begun else []
        return [*work(plan.folder, TRAINED).command, plan.folder.name, *resume]

    ended = {plan.folder.name: result for plan, result in run_in_processes(plans, of)}
    assert (ended["needy"], ended["other"]) == (2.0, 2.0)
    for name in ("greedy", "once"):
        assert str(ended[name]) == "memory: too little"
    states: dict[str, list[str]] = {}
    for entry in read_ledger(home):
        states.setdefault(entry["run"], []).append(entry["state"])
    assert states == {
        "needy": ["submitted", "running", "failed", "running", "done"],
        "other": ["submitted", "running", "done"],
        "greedy": ["submitted", "running", "failed", "running", "failed"],
        "once": ["submitted", "running", "failed"],
    }
    out = capfd.readouterr().out
    assert "out of memory; retrying one at a time: needy, greedy\n" in out
    assert "[4/4] FAILED greedy: memory: too little" in out


# The ledger


def test_a_run_that_has_its_summary_is_done_whatever_signal_met_it(tmp_path: Path) -> None:
    done = "from pathlib import Path; Path('summary.json').write_text('{}')\n"
    killed = work(tmp_path / "killed", done + "os.kill(os.getpid(), 11)")
    (outcome,) = run_all([killed], 1, Ledger(tmp_path), Silent())
    assert (outcome.done, outcome.exit) == (True, -signal.SIGSEGV)

    class Interrupting(Silent):
        def running(self, works: Sequence[Work]) -> None:
            if (tmp_path / "stopped" / "summary.json").exists():
                raise KeyboardInterrupt

    stopped = work(tmp_path / "stopped", done + "import signal; signal.pause()")
    with pytest.raises(KeyboardInterrupt):
        run_all([stopped], 1, Ledger(tmp_path), Interrupting())
    assert ends(tmp_path) == [("done", -signal.SIGSEGV), ("done", -signal.SIGTERM)]
