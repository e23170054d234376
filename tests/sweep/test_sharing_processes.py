"""What the processes of a sweep's runs are told on how they share the machine."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from building import settings
from support import process_state, series, summary, tiny

from gptattn.cli.main import main
from gptattn.compare.finished_runs import read_runs
from gptattn.runs.folder import RunFolder
from gptattn.sweep import run_processes
from gptattn.sweep.plan import Plan
from gptattn.sweep.processes import Outcome, Work
from gptattn.sweep.run_processes import run_in_processes
from gptattn.sweep.sharing import BESIDE_OTHERS
from gptattn.sweep.vectorize import SEEDS


def arguments(plans: Sequence[Plan], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return the arguments that the process of each group of runs gets, on eight cores."""
    found: list[tuple[str, ...]] = []

    def run_all(works: Sequence[Work], parallel: int, *args: object) -> list[Outcome]:
        found.extend(tuple(work.command) for work in works)
        assert len(works) in (0, parallel)
        return [Outcome(folder, 1, "not run", 0.0) for work in works for folder in work.runs]

    monkeypatch.setattr("gptattn.sweep.sharing.usable_cpus", lambda: 8)
    monkeypatch.setattr("gptattn.sweep.run_processes.run_all", run_all)
    monkeypatch.setattr("gptattn.sweep.run_processes.can_fork", lambda: False)
    assert len(list(run_in_processes(plans, lambda plan: []))) == len(plans)
    return found


def planned(folder: Path, seeds: int, *overrides: str) -> list[Plan]:
    cfg = settings("trainer=cpu", *overrides)
    return [Plan([], replace(cfg, seed=seed), folder / f"{seed}") for seed in range(seeds)]


def test_groups_of_seeds_share_all_cores_and_a_resumed_run_keeps_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = planned(tmp_path, 5, "sweep.jobs=7", "sweep.vectorize=2")
    plans[4].folder.mkdir()
    RunFolder(plans[4].folder).write_settings(plans[4].cfg)
    first, second, begun = arguments(plans, monkeypatch)
    for threads, seeds, beside in (first, second):
        assert threads == "trainer.threads=2"
        assert seeds.startswith(SEEDS)
        assert beside == BESIDE_OTHERS
    assert begun == (BESIDE_OTHERS,)


def test_a_group_that_is_alone_has_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((seeds,),) = arguments(planned(tmp_path, 3, "sweep.jobs=8", "sweep.vectorize=3"), monkeypatch)
    assert seeds.startswith(SEEDS)


def test_the_last_run_of_a_sweep_has_the_threads_that_the_others_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (last,) = planned(tmp_path, 1, "sweep.jobs=4")
    ((threads, beside),) = arguments([replace(last, together=4)], monkeypatch)
    assert (threads, beside) == ("trainer.threads=2", BESIDE_OTHERS)


def test_runs_one_after_the_other_are_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arguments(planned(tmp_path, 1, "sweep.jobs=1"), monkeypatch) == [()]


def test_where_the_server_of_copies_cannot_be_started_the_runs_start_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptattn.sweep.fork_server.MODULE", ("/nowhere/python", "-m"))
    with run_processes._server(planned(tmp_path, 2)) as server:
        assert server is None


def test_a_worker_passes_on_that_others_run_beside_it() -> None:
    code = (
        "import json, runpy, sys, gptattn.cli.main as cli\n"
        "def main(seeds, *, beside_others): print(json.dumps([sys.argv[1:], beside_others]))\n"
        "cli.main = main\n"
        "runpy.run_module('gptattn.cli.worker', run_name='__main__', alter_sys=True)\n"
    )
    for given, beside in (([BESIDE_OTHERS, "seed=2"], True), (["seed=2"], False)):
        worker = subprocess.Popen(
            [sys.executable, "-c", code, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with worker:
            assert worker.stdout is not None
            assert json.loads(worker.stdout.read()) == [["seed=2", "--debug"], beside]


def beside_others(folder: Path, *given: str) -> Path:
    """Run this command as a worker does that shares the machine; return the folder of its run."""
    with process_state(), contextlib.chdir(folder):
        sys.argv = ["gptattn-train", *given]
        with pytest.raises(SystemExit) as end:
            main(beside_others=True)
    assert end.value.code == 0
    return folder / "run"


def test_a_run_beside_others_has_its_own_memory_but_no_speed(tmp_path: Path) -> None:
    run = beside_others(tmp_path, *tiny(tmp_path, "sample.tokens=0", "hydra.run.dir=run"))
    for step in (4, 6):
        found = summary(run)
        assert found["steps"] == step
        assert found["shares"] == "machine"
        perf = {name: value for name, value in found["metrics"].items() if name[:5] == "perf/"}
        speed = ("perf/tokens_per_s", "perf/step_ms", "perf/mfu")
        assert {name for name, value in perf.items() if value is None} == set(speed)
        assert len(perf) == 5
        assert {value for name in speed for _, value in series(run, name)} == {None}
        beside_others(tmp_path, "resume=run", "budget.steps=6")
    ((found,), _) = read_runs([run])
    assert found.metrics.keys() & set(speed) == set()
    assert found.metrics["perf/peak_memory_mb"] > 0
