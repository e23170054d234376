"""The estimate of a sweep's time, and what shares the machine best, made in another process."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support import tiny

import gptattn.sweep.estimate
from gptattn.cli.main import check_job
from gptattn.settings.config import TrainConfig
from gptattn.sweep.estimate import STARTUP_SECONDS, Estimator
from gptattn.sweep.sharing import Share


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path / "in"))


def test_the_estimate_is_made_in_another_process_and_grows_with_the_steps(
    cfg: TrainConfig,
) -> None:
    more = replace(cfg, budget=replace(cfg.budget, steps=400_000), seed=7)
    timed = replace(cfg, budget=replace(cfg.budget, steps=None, seconds=5000.0))
    rate = replace(more, optim=replace(cfg.optim, lr=0.5))
    with Estimator() as estimator:
        timing = estimator.timing([cfg, more, timed, rate], [Share(1, None)])
    assert timing is not None
    few, many, given, same = timing.seconds
    assert STARTUP_SECONDS < few < many == same
    assert given > STARTUP_SECONDS + 5000.0
    assert "gptattn.sweep.trial" not in sys.modules


def test_of_several_ways_to_share_the_machine_the_best_is_taken(cfg: TrainConfig) -> None:
    own = replace(cfg, trainer=replace(cfg.trainer, threads=None))
    ways = [Share(1, 1), Share(3, 1)]
    with Estimator() as estimator:
        timing = estimator.timing([own], ways)
    assert timing is not None
    assert timing.share in ways
    # Who is best is for the machine to say; the first is 1 by definition.
    assert timing.gain == 1 if timing.share == ways[0] else timing.gain > 1


def test_a_copy_that_dies_in_a_trial_ends_it(cfg: TrainConfig) -> None:
    code = (
        "import os, gptattn.sweep.trial as trial\n"
        "trial._flops_per_second = lambda *args: os._exit(3)\n"
        "trial.main()\n"
    )
    asked = json.dumps([[asdict(cfg)], [{"jobs": 2, "threads": 1}]])
    ended = subprocess.run(
        [sys.executable, "-c", code], input=asked, text=True, check=False, capture_output=True
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "EOFError")


def test_a_trial_that_hangs_costs_the_estimate_alone(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptattn.sweep.estimate, "PATIENCE_SECONDS", 1e-3)
    with Estimator() as estimator:
        assert estimator.timing([cfg], [Share(1, None)]) is None
        process = estimator._process
    assert process is not None
    assert process.returncode == -signal.SIGKILL


def test_a_trial_ends_itself_where_nobody_else_does(cfg: TrainConfig) -> None:
    code = (
        "import gptattn.sweep.trial as trial\n"
        "def hang(cfg):\n"
        "    while True: pass\n"
        "trial.LIMIT_SECONDS, trial._flops_and_seconds = 1, hang\n"
        "trial.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([[asdict(cfg)], [{"jobs": 1, "threads": 1}]]),
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGALRM


def test_a_trial_that_cannot_be_started_is_no_estimate(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Estimator() as estimator:
        assert estimator.timing([cfg], [Share(1, None)]) is None
