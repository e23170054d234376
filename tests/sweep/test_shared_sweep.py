"""Several machines take the runs of one sweep: each once, and those of one that died again."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import command, ledger_lines, run_folders, summary, tiny

import gptattn.sweep.claims
from gptattn.cli.main import check_job
from gptattn.errors import RunFolderError
from gptattn.machine.lock import is_locked
from gptattn.runs.sweep_states import SWEEP_LOCK, sweep_states
from gptattn.settings.identity import Making
from gptattn.sweep.claims import SharedQueue
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import Plan, in_round
from gptattn.sweep.processes import Outcome, Work

HOLD = "import sys; print('here', flush=True); sys.stdin.read()"


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr(gptattn.sweep.claims, "LOOK_SECONDS", -1.0)
    ledger = Ledger(tmp_path, shared=True)
    ledger.facts = {"host": "this", "round": "now"}
    return ledger


def queue(ledger: Ledger, *names: str, tries: int = 1, said: list[str] | None = None) -> Any:
    works = [Work(ledger.folder / name, ["new"], [], 1.0) for name in names]
    tell = [].append if said is None else said.append
    return SharedQueue(works, ledger, lambda work: replace(work, command=["go on"]), tell, tries)


def taken(queue: Any) -> list[tuple[str, list[str]]]:
    """The names and commands of the works that can be taken, claimed until all are."""
    found = []
    with contextlib.ExitStack() as claims:
        while (one := queue.take()) is not None:
            claims.enter_context(one[1])
            found.append((one[0].folder.name, one[0].command))
    return found


def test_a_claim_lasts_until_both_the_sweep_and_its_run_have_ended(ledger: Ledger) -> None:
    mine, said = queue(ledger, "a", "b"), []
    others = queue(ledger, "a", "b", said=said)
    work, log = mine.take()
    assert work.folder.name == "a"
    held = [sys.executable, "-c", HOLD]
    with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=log, stderr=log) as run:
        log.close()  # as when the sweep is killed, and its run not yet
        (ledger.folder / "a" / "config.yaml").touch()
        ledger.note("a", "running")
        assert taken(others) == [("b", ["new"])]
        assert others
        assert said == ["no run is left to begin; other machines are at work on a"]
        run.kill()
    assert others.ended_elsewhere() == []
    assert taken(others) == [("a", ["go on"])]
    assert said[1:] == ["a has stopped on this and goes on here"]
    assert not others


ENDS: dict[str, tuple[list[Mapping[str, Any]], int, Outcome | None]] = {
    "done": ([{"state": "done", "exit": 0}], 1, Outcome(Path(), 0, "", 9.0, "that")),
    "failed": (
        [{"state": "failed", "exit": 1, "reason": "disk"}],
        1,
        Outcome(Path(), 1, "disk", 9.0, "that"),
    ),
    "stopped": ([{"state": "running"}, {"state": "interrupted", "exit": 130}], 1, None),
    "failed in an earlier round": ([{"state": "failed", "exit": 1, "round": "old"}], 1, None),
    "out of memory once": ([{"state": "failed", "exit": 8}], 2, None),
    "out of memory twice": (
        [{"state": "failed", "exit": 8, "reason": "memory"}] * 2,
        2,
        Outcome(Path(), 8, "memory", 9.0, "that"),
    ),
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("looking", [True, False])
def test_what_has_ended_elsewhere_is_not_run_here(
    ledger: Ledger, how: str, looking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, tries, outcome = ENDS[how]
    ours = queue(ledger, "a", tries=tries)
    for line in lines:
        ledger.note("a", **{"host": "that", "seconds": 9.0, **line})
    before = ours.ended_elsewhere() if looking else []
    found = taken(ours)
    monkeypatch.setattr(gptattn.sweep.claims, "LOOK_SECONDS", 1e9)
    ended = [one for _, one in [*before, *ours.ended_elsewhere()]]
    assert ended == ([] if outcome is None else [replace(outcome, folder=ledger.folder / "a")])
    assert found == ([("a", ["new"])] if outcome is None else [])
    assert not ours


def test_machines_join_each_other_and_no_other_sweep_comes_between(tmp_path: Path) -> None:
    first, second, alone = Ledger(tmp_path, shared=True), Ledger(tmp_path, shared=True), tmp_path
    with first:
        with second:
            assert first.facts == second.facts
            with pytest.raises(RunFolderError, match="a group of processes is running a sweep"):
                Ledger(alone).__enter__()
        second.note("a", "running")
        assert is_locked(tmp_path / SWEEP_LOCK)
        assert sweep_states(tmp_path).going
        was = first.facts["round"]
    assert not sweep_states(tmp_path).going
    with Ledger(alone), pytest.raises(RunFolderError, match=f"process {os.getpid()} is running"):
        first.__enter__()
    with first:
        assert first.facts["round"] != was
    (line,) = ledger_lines(tmp_path)
    assert (line["host"], line["round"]) == (os.uname().nodename, was)


def test_a_folder_without_such_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("gptattn.machine.lock.fcntl.flock", unsupported)
    with pytest.raises(RunFolderError, match=r"cannot be locked: Function not implemented; give"):
        Ledger(tmp_path, shared=True).__enter__()


def test_all_machines_of_a_round_have_one_folder_for_a_run(tmp_path: Path) -> None:
    making = Making("text", "cpu", {"gptattn.model": "1"})
    cfg = check_job(tiny(tmp_path))
    plan = Plan(["seed=1"], cfg, tmp_path / "mha_s1_0a0a0a", making=making)
    elsewhere = replace(plan, folder=tmp_path / "mha_s1_1b1b1b", bytes_on_disk=9)
    folder = in_round(plan, "now").folder
    assert in_round(elsewhere, "now").folder == folder != plan.folder
    assert folder.name.startswith("mha_s1_")
    for other in (
        in_round(plan, "then"),
        in_round(replace(plan, cfg=replace(cfg, seed=2)), "now"),
        in_round(replace(plan, making=replace(making, code={"gptattn.model": "2"})), "now"),
        in_round(replace(plan, making=replace(making, device="cuda")), "now"),
    ):
        assert other.folder != folder
    named = replace(plan, folder=tmp_path / "by_hand")
    assert in_round(named, "now") == named


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["sweep.vectorize=2"], "sweep.shared: takes single runs; leave sweep.vectorize out"),
        (["hydra/launcher=basic"], "sweep.shared: needs launcher=processes; leave one"),
        (["checkpoint=false"], "sweep.shared: needs checkpoints, from which another machine"),
        (["trainer.precision=auto"], "trainer.precision: auto may come out differently on each"),
    ],
)
def test_what_machines_cannot_share_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, own: list[str], message: str
) -> None:
    arguments = tiny(tmp_path, "sweep.shared=true", "sweep.jobs=1", *own)
    assert command(tmp_path, "-m", *arguments, "seed=1,2") == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


def sweep(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    train = [sys.executable, str(Path(__file__).parents[2] / "train.py"), "-m"]
    return subprocess.Popen(
        [*train, *arguments], cwd=folder, text=True, stdout=subprocess.PIPE, start_new_session=True
    )


def once(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    """Return what the condition gives once it is true, while the process runs."""
    while not (found := condition()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"ended with {process.wait(0.02)}")
    return found


@pytest.mark.slow
def test_two_sweeps_share_the_runs_and_one_takes_over_what_the_other_dies_with(
    tmp_path: Path,
) -> None:
    home = tmp_path / "outputs" / "scratch"
    arguments = tiny(tmp_path, "seed=1,2,3", "sweep.shared=true", "sweep.jobs=1")

    def running(pids: set[int]) -> dict[str, int]:
        lines = ledger_lines(home) if (home / "ledger.jsonl").exists() else []
        states = {line["run"]: line for line in lines if line["run"]}
        live = {r: line["pid"] for r, line in states.items() if line["state"] == "running"}
        return {run: pid for run, pid in live.items() if pid not in pids}

    with sweep(tmp_path, *arguments) as dying:
        ((lost, pid),) = once(lambda: running(set()), dying).items()
        os.kill(pid, signal.SIGSTOP)  # so that it does not end before the other sweep has come
        with sweep(tmp_path, *arguments) as other:
            once(lambda: running({pid}), other)
            os.killpg(dying.pid, signal.SIGKILL)
            os.killpg(pid, signal.SIGKILL)
            said, _ = other.communicate()
    assert other.returncode == 0
    assert f"{lost} has stopped on {os.uname().nodename} and goes on here" in said
    assert "3 runs" in said
    assert sorted(summary(run)["seed"] for run in run_folders(tmp_path)) == [1, 2, 3]
    lines = [line for line in ledger_lines(home) if line["state"] in ("running", "done")]
    begun = [line["run"] for line in lines if line["state"] == "running"]
    assert sorted(begun) == sorted([*{line["run"] for line in lines}, lost])
    assert sum(line["state"] == "done" for line in lines) == 3
    # Whoever comes later finds nothing to do.
    assert command(tmp_path, "-m", *arguments) == 0
