"""The estimate of a sweep's time, and what shares the machine best, made in another process."""

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import tiny

import gptattn.sweep.estimate
from gptattn.cli.main import check_job
from gptattn.model.cost import measure_cost
from gptattn.settings.build import build_model
from gptattn.settings.config import TrainConfig
from gptattn.sweep import trial
from gptattn.sweep.estimate import STARTUP_SECONDS, Estimator
from gptattn.sweep.fork_server import ForkServer
from gptattn.sweep.sharing import Share


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path / "in"))


def test_the_estimate_is_made_in_another_process_for_each_way_and_grows_with_the_steps(
    cfg: TrainConfig,
) -> None:
    cfg = replace(cfg, trainer=replace(cfg.trainer, threads=None))
    more = replace(cfg, budget=replace(cfg.budget, steps=400_000), seed=7)
    timed = replace(cfg, budget=replace(cfg.budget, steps=None, seconds=5000.0))
    rate = replace(more, optim=replace(cfg.optim, lr=0.5))
    ways = [Share(1, 1), Share(3, 1)]
    with Estimator() as estimator:
        timing = estimator.timing([cfg, more, timed, rate], ways)
    assert timing is not None
    assert list(timing) == ways
    for few, many, given, same in timing.values():
        assert STARTUP_SECONDS < few < many == same
        assert given > STARTUP_SECONDS + 5000.0


def test_a_way_for_which_the_memory_is_too_small_is_not_tried(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def together(cfg: TrainConfig, share: Share) -> tuple[float, float]:
        tried.append(share.jobs)
        return 100.0 * share.jobs, 10.0  # bytes of each run

    monkeypatch.setattr(trial, "_together", together)
    monkeypatch.setattr(trial, "available_memory_bytes", lambda: 29)
    assert trial._rates(cfg, [Share(jobs, None) for jobs in (1, 3, 2)]) == [100.0, None, 200.0]
    assert tried == [1, 2]
    # The first is tried always: without it there is no run at all.
    assert trial._rates(cfg, [Share(7, None)]) == [700.0]


def test_a_run_needs_its_weights_four_times_and_the_activations_of_all_its_rows(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([50.0, 53.0])  # MB, before and after the steps
    monkeypatch.setattr(trial, "set_threads", lambda threads: None)
    monkeypatch.setattr(trial, "reset_peak_memory", lambda device: None)
    monkeypatch.setattr(trial, "peak_memory_mb", lambda device: next(peaks))
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(trial, "TRIAL_TOKENS", 2 * cfg.model.context_length)
    large = replace(cfg, batch_size=28, accumulate=2)  # 14 rows, of which the trial takes 2
    params = measure_cost(build_model(large, 256)).params
    _, needs = trial._measured(large, 1)
    assert needs == pytest.approx(4 * 4 * params + 7 * (3e6 - 2 * 4 * params))


def test_on_a_gpu_the_rate_of_one_run_is_that_of_all(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_measured", lambda cfg, threads: (100.0, 1.0))
    for device, rate in (("cuda", 100.0), ("cpu", 300.0)):
        monkeypatch.setattr(trial, "resolve_device", lambda name, d=device: torch.device(d))
        monkeypatch.setattr(trial, "can_fork", lambda: False)
        assert trial._together(cfg, Share(3, 1)) == (rate, 1.0)


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """A server whose copies have the trial: importing torch takes longer than what is asked."""
    # They are to find run_code.
    tests = str(Path(__file__).parents[1])
    with mock.patch.dict(os.environ, PYTHONPATH=tests), ForkServer([trial.__name__]) as server:
        yield server


def trial_process(forks: ForkServer, cfg: TrainConfig, jobs: int, *changes: str) -> tuple[int, str]:
    """The exit code and output of a trial of so many runs at once, with its module changed.

    Its copies hold the output too, which so ends with the last of them.
    """
    code = "\n".join(["import os, time, gptattn.sweep.trial as trial", *changes, "trial.main()"])
    asked = json.dumps([[asdict(cfg)], [{"jobs": jobs, "threads": 1}]])
    reads, writes = os.pipe()
    with tempfile.TemporaryFile() as stdin, os.fdopen(writes, "wb") as output:
        stdin.write(asked.encode())
        stdin.seek(0)
        copy = forks.start([sys.executable, "-m", "run_code", code], stdin.fileno(), output)
    said = b""
    with os.fdopen(reads, "rb", buffering=0) as pipe:
        while True:
            assert select.select([pipe], [], [], 25)[0], "a process of the trial goes on"
            if not (more := pipe.read(4096)):
                return copy.wait(25), said.decode()
            said += more


def test_a_copy_that_dies_in_a_trial_ends_it(forks: ForkServer, cfg: TrainConfig) -> None:
    code, said = trial_process(forks, cfg, 2, "trial._measured = lambda *args: os._exit(3)")
    assert (code, said.splitlines()[-1]) == (1, "EOFError")


def test_a_trial_that_hangs_costs_the_estimate_alone(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptattn.sweep.estimate, "PATIENCE_SECONDS", 1e-3)
    with Estimator() as estimator:
        process = estimator._process
        assert estimator.timing([cfg], [Share(1, None)]) is None
    assert process is not None
    assert process.returncode == -signal.SIGKILL


HANGS = """
import os, signal, time
from pathlib import Path
from gptattn.attention import MultiHeadAttention

class Hanging(MultiHeadAttention):
    def __init__(self, d_in, d_out, context_length, num_heads, out_proj, scale, window, backend):
        super().__init__(d_in, d_out, context_length, num_heads)

    def forward(self, x, *args, **kwargs):
        if x.device.type == "cpu":
            Path(os.environ["HANGS_HERE"]).write_text(str(os.getpid()))
            os.kill(int(os.environ["SWEEP"]), signal.SIGINT)
            time.sleep(30)
            Path(os.environ["HANGS_HERE"]).write_text("nobody ended it")
        return super().forward(x, *args, **kwargs)
"""


def test_what_hangs_in_a_copy_of_the_trial_ends_with_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "pid"
    (tmp_path / "hanging_attention.py").write_text(HANGS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in (("PYTHONPATH", tmp_path), ("HANGS_HERE", here), ("SWEEP", os.getpid())):
        monkeypatch.setenv(name, str(value))
    own = ["attn._target_=hanging_attention.Hanging", "allow_targets=[hanging_attention]"]
    cfg = check_job(tiny(tmp_path / "in", *own))
    # Whatever an earlier test in this process has left.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Estimator() as estimator:
            estimator.timing([cfg], [Share(1, 1)])
    finally:
        signal.signal(signal.SIGINT, before)
    copy = int(here.read_text())
    with contextlib.suppress(ProcessLookupError):  # it is gone
        ending = os.pidfd_open(copy)
        assert select.select([ending], [], [], 5) == ([ending], [], [])
        os.close(ending)


def test_the_copies_of_a_trial_end_themselves_where_nobody_else_does(
    forks: ForkServer, cfg: TrainConfig
) -> None:
    hangs = "trial._measured = lambda *args: time.sleep(30)"
    code, _ = trial_process(forks, cfg, 2, "trial.LIMIT_SECONDS = 1", hangs)
    assert code in (-signal.SIGALRM, 1)  # 1: a copy was the first to end


def test_a_trial_ends_itself_where_nobody_else_does(forks: ForkServer, cfg: TrainConfig) -> None:
    hangs = "def hang(cfg):\n    while True: pass\ntrial._flops_and_seconds = hang"
    assert trial_process(forks, cfg, 1, "trial.LIMIT_SECONDS = 1", hangs)[0] == -signal.SIGALRM


def test_a_trial_that_cannot_be_started_is_no_estimate(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Estimator() as estimator:
        assert estimator.timing([cfg], [Share(1, None)]) is None
