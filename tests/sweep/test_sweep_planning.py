"""What a sweep is before its first run: its jobs, how they share the machine, what is refused."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from support import check_job, refuses, tiny

from gptattn.settings.config import TrainConfig
from gptattn.sweep.jobs import split_overrides
from gptattn.sweep.progress import describe_running
from gptattn.sweep.stages import share_machine
from gptattn.sweep.tuning import find_vertex, next_rate, read_tune, shrink


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return check_job(tiny(tmp_path_factory.mktemp("in")))


# What is asked for


def test_a_variants_overrides_part_at_spaces_before_a_name():
    overrides = ["a=1", "part=[gate, sink]", "+b.c='x y'", "group@d={e: 1}", "~f", "g/h=2"]
    assert split_overrides(f" {'  '.join(overrides)} ") == overrides
    assert split_overrides("") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": None}, "lr: null"),
        ({"lr": []}, "lr: empty"),
        ({"lr": [0.1, 0]}, "lr[1]: > 0"),
        ({"seed": -1}, "seed: >= 0"),
        ({"rates": [1]}, "rates: not a setting"),
    ],
)
def test_rates_that_cannot_be_are_refused_by_name(change, said):
    with refuses(f"hydra.sweeper.tune.{said}"):
        read_tune({"lr": [0.1, 0.2], "seed": 0, **change})


@pytest.mark.parametrize(
    ("losses", "further"),
    [
        ({1.0: 2.0, 2.0: 1.0, 4.0: 3.0}, None),
        ({1.0: 1.0, 2.0: 2.0, 4.0: 3.0}, 0.5),
        ({1.0: 3.0, 2.0: 2.0, 6.0: 1.0}, 18.0),
        ({1.0: 2.0, 2.0: math.inf}, 0.5),
        ({1.0: math.inf, 2.0: math.inf}, None),
        ({1.0: 1.0, 2.0: None}, None),  # a trial failed
        ({1.0: 1.0}, None),
        (dict.fromkeys((2.0**i for i in range(10)), 1.0), None),  # ten are enough
    ],
)
def test_a_further_rate_lies_beyond_the_best_where_that_is_at_the_edge(losses, further):
    assert next_rate(losses) == further


def test_the_vertex_is_the_parabolas_through_the_best_rate_and_neighbours():
    parabola = {rate: math.log(rate / 0.013) ** 2 for rate in (0.001, 0.005, 0.01, 0.04)}
    assert find_vertex(parabola) == 0.013
    assert find_vertex({0.01: 2.0, 0.02: 1.0, 0.04: 2.0}) == 0.02
    assert find_vertex({0.01: 2.0, 0.02: 1.0, 0.04: math.inf}) == 0.02
    assert find_vertex({0.01: 1.0, 0.02: 2.0, 0.04: 3.0}) == 0.01
    assert find_vertex({0.01: 1.0, 0.02: 1.0, 0.04: 1.0}) == 0.01


def test_a_share_of_a_budget_is_in_whole_steps_and_tokens():
    assert shrink({"steps": 10, "tokens": None, "flops": 10.0}, 0.25) == {"steps": 2, "flops": 2.5}
    assert shrink({"steps": 1, "accuracy": 0.9}, 0.1) == {"steps": 1}


# What is said of runs in progress


def test_a_running_run_is_described_by_its_last_rows(tmp_path):
    rows = tmp_path / "mha_s1" / "metrics.jsonl"
    assert describe_running(rows.parent, 9) == "mha_s1  0:00:09, no step yet"
    rows.parent.mkdir()
    trained = {"step": 40, "train/loss": 2.5, "progress/budget": 0.25, "progress/seconds": 20.0}
    rows.write_text(f"{json.dumps(trained)}\n" + '{"step": 40, "val/loss": 2.6}\n{"step": 50, "tr')
    # A quarter took 20 s; the half-written row does not count.
    assert describe_running(rows.parent, 99) == "mha_s1  step 40  loss 2.500  25%  0:01:00 left"
    rows.write_text('{"step": "?", "train/loss": []}\n')
    assert describe_running(rows.parent, 9) == "mha_s1  0:00:09, no step yet"


# How runs share the machine


def test_runs_at_once_and_their_threads_share_the_cores(cfg, monkeypatch):
    monkeypatch.setattr("gptattn.sweep.stages.usable_cpus", lambda: 8)

    def share(jobs: int | str | None, threads: int | None, runs: int = 20, width: int = 16) -> Any:
        trainer, model = replace(cfg.trainer, threads=threads), replace(cfg.model, d_model=width)
        sweep = replace(cfg.sweep, jobs=jobs)
        return share_machine([replace(cfg, trainer=trainer, model=model, sweep=sweep)] * runs)

    # By sweep.jobs and trainer.threads: how many run at once, and the threads given to each.
    assert share("auto", None) == share(None, None) == (8, 1)
    assert share("auto", 2) == (4, None)
    assert share("auto", 16) == share(1, None) == (1, None)
    assert share(4, None) == (4, 2)
    assert share(2, 2) == (2, None)
    assert share("auto", None, runs=3) == (3, 2)
    assert share("auto", None, runs=1) == (1, None)
    assert share("auto", None, width=65_536) == (1, None)  # a large step has all cores
    assert share(9, None) == (8, 1)
    assert share(5, 2) == (4, None)  # there are cores for four
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    gpu = replace(cfg, trainer=replace(cfg.trainer, accelerator="gpu", threads=None))
    assert share_machine([gpu] * 20) == (1, None)
    assert share_machine([replace(gpu, sweep=replace(cfg.sweep, jobs=2))] * 20) == (2, None)
