"""Sweeps: what is done is not repeated, a failure stops no other run, and the ledger knows all."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from support import command, run_folders, summary, tiny, train
from tortures.bench import fingerprint

from gptattn.cli.compose import CONF, quoted, worker_command
from gptattn.cli.main import check_job
from gptattn.cli.resume_settings import resume_argument
from gptattn.errors import ConfigError, RunFolderError
from gptattn.machine.console import span
from gptattn.machine.device import usable_cpus
from gptattn.runs.folder import RunFolder
from gptattn.runs.rows import share_done
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import Making, settings_key, went_on
from gptattn.sweep.ledger import NAME, Ledger, read_ledger
from gptattn.sweep.plan import (
    Found,
    Plan,
    finished_runs,
    folders_done,
    going_on,
    slots,
    threads_each,
)
from gptattn.sweep.processes import Outcome, Work, run_all

DONE = "from pathlib import Path; Path('summary.json').write_text('{}')"


class Silent:
    """A watcher that shows nothing; `on_poll` may act."""

    def __init__(self, on_poll: Callable[[], None] = lambda: None) -> None:
        self.on_poll = on_poll

    def started(self, work: Work) -> None: ...

    def running(self, works: Sequence[Work]) -> None:
        self.on_poll()

    def ended(self, work: Work, outcome: Outcome) -> None: ...


def work(folder: Path, name: str, code: str) -> Work:
    """A process that runs this Python in its run folder."""
    here = f"import os; os.chdir({str(folder / name)!r})\n"
    return Work(folder / name, [sys.executable, "-c", here + code], ["seed=1"], 1.0)


def ledger_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


# Processes

FAILURES = {
    "an exception": ("import json; json.loads('{')", 1, "json.decoder.JSONDecodeError: "),
    "an exit that says all is well": ("raise SystemExit(0)", 0, "ended without a summary.json"),
    "an exit": ("raise SystemExit(1)", 1, "exit code 1"),
    "a kill": ("os.kill(os.getpid(), 9)", -9, "killed by SIGKILL"),
    "not a number": (
        "print('error: train/loss: is nan at step 3'); raise SystemExit(5)",
        5,
        "train/loss: is nan at step 3",
    ),
    "no memory": ("raise MemoryError", 1, "MemoryError"),
    "a full disk": (
        "import sys; print('error: disk: No space left', file=sys.stderr); raise SystemExit(7)",
        7,
        "disk: No space left",
    ),
    "a crash": ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, "killed by SIGSEGV"),
}


def test_a_failed_run_stops_no_other_and_the_ledger_says_why(tmp_path: Path) -> None:
    works = []
    for name, (code, _, _) in FAILURES.items():
        works += [work(tmp_path, name, code), work(tmp_path, f"after {name}", DONE)]
    outcomes = run_all(works, 2, Ledger(tmp_path), Silent())
    assert [outcome.folder for outcome in outcomes] == [w.folder for w in works]
    ends = {line["run"]: line for line in ledger_lines(tmp_path) if line["state"] != "running"}
    for outcome in outcomes:
        name = outcome.folder.name
        line = ends[name]
        if name.startswith("after "):
            assert (outcome.done, line["state"], line["exit"]) == (True, "done", 0)
            continue
        _, code, reason = FAILURES[name]
        assert (outcome.done, line["state"], line["exit"]) == (False, "failed", code)
        assert line["reason"].startswith(reason)


def test_a_command_that_cannot_be_started_is_a_failed_run(tmp_path: Path) -> None:
    works = [
        Work(tmp_path / "a", [str(tmp_path / "nothing")], [], 1.0),
        work(tmp_path, "b", DONE),
    ]
    first, second = run_all(works, 1, Ledger(tmp_path), Silent())
    assert "could not be started" in first.reason
    assert second.done


def test_at_most_so_many_run_at_once_and_one_after_the_other_with_one_slot(tmp_path: Path) -> None:
    works = [work(tmp_path, f"{i}", DONE) for i in range(3)]
    run_all(works, 1, Ledger(tmp_path), Silent())
    states = [line["state"] for line in ledger_lines(tmp_path)]
    assert states == ["running", "done"] * 3


def test_two_slots_run_two_at_once(tmp_path: Path) -> None:
    # Each ends only once the other has begun: one after the other they would never end.
    wait = "from pathlib import Path\nPath('here').touch()\nwhile not Path({!r}).exists(): pass\n"
    works = [
        work(tmp_path, "a", wait.format(str(tmp_path / "b" / "here")) + DONE),
        work(tmp_path, "b", wait.format(str(tmp_path / "a" / "here")) + DONE),
    ]
    assert all(outcome.done for outcome in run_all(works, 2, Ledger(tmp_path), Silent()))


def test_an_interrupt_ends_the_processes_and_is_in_the_ledger(tmp_path: Path) -> None:
    ready = tmp_path / "a" / "ready"

    def interrupt_once_ready() -> None:
        if ready.exists():
            raise KeyboardInterrupt

    forever = "from pathlib import Path; Path('ready').touch()\nimport signal; signal.pause()"
    works = [work(tmp_path, "a", forever), work(tmp_path, "b", DONE)]
    with pytest.raises(KeyboardInterrupt):
        run_all(works, 1, Ledger(tmp_path), Silent(interrupt_once_ready))
    lines = ledger_lines(tmp_path)
    assert [(line["run"], line["state"]) for line in lines] == [
        ("a", "running"),
        ("a", "interrupted"),
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(lines[0]["pid"], 0)


def test_what_a_run_prints_is_in_its_folder(tmp_path: Path) -> None:
    run_all([work(tmp_path, "a", "print('hello')\n" + DONE)], 1, Ledger(tmp_path), Silent())
    assert (tmp_path / "a" / "console.log").read_text() == "hello\n"


# The ledger


def test_a_second_sweep_in_one_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with (
        Ledger(tmp_path),
        pytest.raises(RunFolderError, match=f"process {os.getpid()} "),
        Ledger(tmp_path),
    ):
        pass
    with Ledger(tmp_path):
        pass


def test_a_disk_that_takes_no_line_stops_nothing_but_is_known(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "gone")
    ledger.note("a", "done")
    assert isinstance(ledger.unwritten, OSError)


def test_a_line_that_was_cut_short_costs_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.note("a", "running")
    with (tmp_path / NAME).open("a") as file:
        file.write('{"time": 1, "run": "b", "sta')
    ledger.note("c", "failed", exit=5)
    assert [line["run"] for line in read_ledger(tmp_path)] == ["a", "c"]
    assert list(read_ledger(tmp_path / "none")) == []


# What is done


MAKING = Making("text", "cpu", {"gptattn.attention.mha": "a"})


def finished(folder: Path, cfg: TrainConfig, status: str = "done") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(cfg)))
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    RunFolder(folder).write_making(MAKING)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step=2.ckpt").touch()
    return folder


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path / "in", "optim.lr=1e-05"))


def test_a_run_is_done_where_a_finished_one_has_its_settings(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    other = replace(cfg, seed=2)
    done = finished(tmp_path / "out" / "a", cfg)
    plans = [
        Plan([], c, tmp_path / "out" / name, making=MAKING)
        for c, name in ((cfg, "x"), (other, "y"))
    ]
    assert folders_done(plans) == Found({plans[0].folder: done}, {})


def test_a_run_that_was_extended_is_done_as_what_its_first_budget_made(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    longer = replace(cfg, budget=replace(cfg.budget, steps=9))
    done = finished(tmp_path / "out" / "a", longer)
    ends = [{"budget": asdict(c.budget), "step": c.budget.steps} for c in (cfg, longer)]
    (done / "summary.json").write_text(
        json.dumps({"status": "done", "steps": 9, "completed": ends})
    )
    # Its later part was made by other code.
    RunFolder(done).write_making(went_on(MAKING, replace(MAKING, code={}), cfg.budget.steps or 0))
    plans = [
        Plan([], c, tmp_path / "out" / name, making=MAKING)
        for c, name in ((cfg, "x"), (longer, "y"))  # of one schedule, it was not
    ]
    assert folders_done(plans) == Found({plans[0].folder: done}, {})
    assert folders_done(plans, with_weights=True) == Found({}, {})


def test_how_a_sweep_is_run_is_no_part_of_what_a_run_is(cfg: TrainConfig) -> None:
    key = settings_key(asdict(cfg))
    same = replace(
        cfg,
        sweep=replace(cfg.sweep, jobs=2, fresh=True),
        trainer=replace(cfg.trainer, threads=2),
        experiment_name="other",
    )
    assert settings_key(asdict(same)) == key
    for changed in (
        replace(cfg, seed=2),
        replace(cfg, optim=replace(cfg.optim, lr=2e-5)),
        replace(cfg, trainer=replace(cfg.trainer, precision="64-true")),
    ):
        assert settings_key(asdict(changed)) != key


@pytest.mark.parametrize("damage", ["summary.json", "config.yaml"])
def test_half_a_record_is_no_finished_run(damage: str, cfg: TrainConfig, tmp_path: Path) -> None:
    folder = finished(tmp_path / "out" / "a", cfg)
    whole = (folder / damage).read_text()
    (folder / damage).write_text(whole[: len(whole) // 2] + '{"')
    assert finished_runs(tmp_path / "out") == {}


def test_a_run_that_did_not_end_well_is_no_finished_run(cfg: TrainConfig, tmp_path: Path) -> None:
    finished(tmp_path / "out" / "a", cfg, status="failed")
    assert finished_runs(tmp_path / "out") == {}


# How many at once


def with_sweep(cfg: TrainConfig, jobs: int | None, threads: int | None) -> TrainConfig:
    trainer = replace(cfg.trainer, threads=threads)
    return replace(cfg, sweep=replace(cfg.sweep, jobs=jobs), trainer=trainer)


def test_runs_at_once_and_their_threads_share_the_cores(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptattn.sweep.plan.usable_cpus", lambda: 8)
    # (sweep.jobs, trainer.threads) -> runs at once, threads that are given to each
    expected = {
        (None, None): (1, None),
        (None, 2): (4, None),
        (None, 3): (2, None),
        (4, None): (4, 2),
        (3, None): (3, 2),
        (2, 2): (2, None),
        (None, 16): (1, None),
    }
    for (jobs, threads), (at_once, each) in expected.items():
        asked = with_sweep(cfg, jobs, threads)
        assert (slots(asked), threads_each(asked)) == (at_once, each)
    for jobs, threads in ((9, None), (5, 2)):
        with pytest.raises(ConfigError, match=r"sweep\.jobs"):
            slots(with_sweep(cfg, jobs, threads))


# What is shown


def test_the_share_done_is_the_newest_whole_row(tmp_path: Path) -> None:
    assert share_done(RunFolder(tmp_path)) == 0.0
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"progress/budget": 0.25}\n{"val/loss": 2.0}\n{"progress/bud')
    assert share_done(RunFolder(tmp_path)) == 0.25


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (4.4, "4 s"),
        (89, "89 s"),
        (150, "2 min"),
        (3600, "60 min"),
        (12_000, "3 h 20 min"),
        (47 * 3600, "47 h 0 min"),
        (48 * 3600, "2 d 0 h"),
        (452_611, "5 d 6 h"),
    ],
)
def test_a_span_of_time_reads_as_a_person_says_it(seconds: float, shown: str) -> None:
    assert span(seconds) == shown


@pytest.mark.parametrize("value", ["a,b=c_s1", "it's", "back\\slash", "sp ace", "x\\'y", "end\\"])
def test_aquoted_value_is_read_back_by_hydra(value: str) -> None:
    override = OverridesParser.create().parse_override(f"key={quoted(value)}")
    assert override.value() == value


def test_only_a_run_that_can_go_on_is_gone_on_with(cfg: TrainConfig, tmp_path: Path) -> None:
    def begun(name: str, exit_code: int | None, checkpoint: bool = True) -> Path:
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(asdict(cfg)))
        RunFolder(folder).write_making(MAKING)
        if checkpoint:
            (folder / "checkpoints" / "step=2.ckpt").touch()
        if exit_code is not None:
            Ledger(tmp_path).note(name, "failed", exit=exit_code)
        return folder

    plan = Plan([], cfg, tmp_path / "new", making=MAKING)
    begun("without a checkpoint", None, checkpoint=False)
    begun("with other data now", 3)
    begun("with no good checkpoint", 4)
    begun("that became NaN", 5)
    assert going_on([plan], Found({}, {})) == [plan]
    killed = begun("killed", -9)
    assert going_on([plan], Found({}, {})) == [replace(plan, folder=killed)]
    assert going_on([plan], Found({plan.folder: killed}, {})) == [plan]
    # Two plans of the same settings do not go on with one run.
    folders = [each.folder for each in going_on([plan, plan], Found({}, {}))]
    assert folders == [killed, plan.folder]
    (killed / "summary.json").write_text("{}")
    assert going_on([plan], Found({}, {})) == [plan]


def test_a_run_that_goes_on_is_resumed_with_the_packages_it_needs(
    cfg: TrainConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "mha,it's_s1_0"
    folder.mkdir()
    (folder / "config.yaml").touch()
    plan = Plan(["seed=1"], replace(cfg, allow_targets=["mine", "yours"]), folder)
    command_line = worker_command(OmegaConf.create(), plan)[3:]
    resume, others = resume_argument(command_line)
    assert resume == str(folder)
    assert others == ["allow_targets=[mine,yours]"]


# From the command line


def test_a_sweep_outlives_a_failed_run_and_the_rerun_makes_only_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny(tmp_path, "optim.lr=1e-3,1e30", "seed=1,2", "checkpoint=false"), "-m"]
    assert command(tmp_path, *arguments) == 5
    out, err = capfd.readouterr()
    assert "4 runs, in outputs/scratch" in out
    assert "4 to run" in out
    assert "about" in out
    assert out.count("FAILED") == 2
    assert err == "error: sweep: 2 of 4 runs failed; the same command runs them again\n"
    done = run_folders(tmp_path)
    assert {summary(run)["seed"] for run in done} == {1, 2}
    ledger = tmp_path / "outputs" / "scratch"
    failed = [line for line in ledger_lines(ledger) if line["state"] == "failed"]
    assert {line["exit"] for line in failed} == {5}
    assert all("train/" in line["reason"] or "val/loss" in line["reason"] for line in failed)

    before = len(ledger_lines(ledger))
    assert command(tmp_path, *arguments) == 5
    out = capfd.readouterr().out
    assert "2 of them done already" in out
    started = [line for line in ledger_lines(ledger)[before:] if line["state"] == "running"]
    assert all("optim.lr=1e+30" in line["overrides"] for line in started)
    assert len(started) == 2
    assert run_folders(tmp_path) == done


def test_ctrl_c_ends_a_sweep_with_130_and_the_rerun_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = ("budget.steps=40", "validation.count=20", "log_every=50", "model.dropout=0.1")
    arguments = [*tiny(tmp_path, *long, "seed=1,2", "sweep.jobs=1"), "-m"]
    start = [sys.executable, str(CONF.parent / "train.py"), *arguments]
    process = subprocess.Popen(
        start,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Shells start what runs in the background with Ctrl-C ignored; so may these tests be.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    ledger = tmp_path / "outputs" / "scratch" / NAME
    deadline = time.monotonic() + 120
    while len(list(ledger.parent.glob("mha_s2*/checkpoints/*.ckpt"))) == 0:
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"stopped: 1 of 2 runs are done; the same command runs the others" in err
    assert b"Traceback" not in err
    states = [line["state"] for line in ledger_lines(ledger.parent)]
    assert states == ["running", "done", "running", "interrupted"]
    capfd.readouterr()
    assert command(tmp_path, *arguments) == 0
    assert "2 runs, 1 of them done already, 1 begun" in capfd.readouterr().out
    first, second = run_folders(tmp_path)
    assert [summary(run)["seed"] for run in (first, second)] == [1, 2]
    assert {path.name for path in ledger.parent.glob("mha*")} == {first.name, second.name}
    lines = ledger_lines(ledger.parent)
    assert [line["state"] for line in lines[4:]] == ["running", "done"]
    assert lines[4]["run"] == lines[2]["run"] == second.name
    assert "goes on after step" in (second / "console.log").read_text(encoding="utf-8")
    alone = train(tmp_path / "alone", *long, "seed=2")
    assert fingerprint(second) == fingerprint(alone)


def test_runs_can_be_sent_through_submitit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny(tmp_path, "launcher=submitit_local", "optim.lr=1e-3,1e30"), "-m"]
    assert command(tmp_path, *arguments) == 1
    assert "1 of 2 runs failed" in capfd.readouterr().err
    states = [line["state"] for line in ledger_lines(tmp_path / "outputs" / "scratch")]
    assert states == ["submitted", "submitted", "done", "failed"]
    assert len(run_folders(tmp_path)) == 1


def test_the_suite_is_a_sweep_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, "experiment=attention_suite")) == 2
    assert "add -m" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hydra.sweep.subdir=x", "seed=1,2"], "error: hydra.sweep.subdir: gives several runs"),
        (["hydra.sweep.subdir=../../y"], "error: hydra.sweep.subdir: '../../y' is no name of a"),
        (["hydra.sweep.subdir=."], "error: hydra.sweep.subdir: '.' is no name of a folder"),
        ([f"sweep.jobs={usable_cpus() + 1}"], "error: sweep.jobs: "),
        (["attn=mha,gqaa"], "error: attn: 'gqaa' is unknown"),
        (["match=params", "match_to=mhaa", "seed=1,2"], "error: match_to: 'mhaa' is no variant"),
    ],
)
def test_a_sweep_that_cannot_work_writes_nothing(
    arguments: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, *arguments), "-m") == 2
    assert capfd.readouterr().err.startswith(said)
    assert not (tmp_path / "outputs").exists()
