"""Trackers beside TensorBoard: the same rows, none lost or twice, and none that stops a run."""

import csv
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import probe_trackers
import pytest
import yaml
from building import PROBE_CONFIGS, settings
from interrupted import SIX, begun, crash, once
from rich.console import Console
from support import command, process_state, rows, summary, tiny, train
from tortures.bench import fingerprint

from gptattn.runs.folder import RunFolder
from gptattn.settings.identity import settings_key
from gptattn.training.precheck import check_run
from gptattn.training.trackers import feed, tracker
from gptattn.training.vectorized import train_seeds

PROBES = (f"hydra.searchpath=[file://{PROBE_CONFIGS}]", "allow_targets=[probe_trackers]")
KEPT = (*PROBES, "logger=[probe_kept]")
FAILS = "logger.probe_kept.fails"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take more than seconds."""
    for name in ("OPENING", "ENDING", "STOPPING"):
        monkeypatch.setattr(feed, name, 600)


Rows = list[tuple[int, dict[str, float]]]


def recorded(run: Path) -> Rows:
    """The numbers of metrics.jsonl by step, row by row."""
    found = [
        (row["step"], {k: float(v) for k, v in row.items() if isinstance(v, int | float)})
        for row in rows(run)
    ]
    for _, numbers in found:
        del numbers["step"], numbers["time"]
    return [(step, numbers) for step, numbers in found if numbers]


def table(run: Path) -> Rows:
    """The numbers of the CSV table by step, row by row."""
    with (run / "trackers" / "csv" / "metrics.csv").open(newline="") as file:
        return [
            (int(row.pop("step")), {k: float(v) for k, v in row.items() if v})
            for row in csv.DictReader(file)
        ]


def kept(run: Path) -> list[str]:
    return (run / "trackers" / "kept.txt").read_text().splitlines()


def named(run: Path) -> list[str]:
    """What the probe is to have of the run, by its record."""
    return [f"row {step} {' '.join(numbers)}" for step, numbers in recorded(run)]


def only_rows(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("row")]


def test_the_table_has_the_rows_of_the_record_and_tensorboard_stays_on(tmp_path: Path) -> None:
    run = train(tmp_path, "logger=[csv]")
    assert table(run) == recorded(run)
    assert len(table(run)) > 8
    found = yaml.safe_load((run / "trackers" / "csv" / "hparams.yaml").read_text())
    assert found == summary(run)["hyperparameters"]
    assert [*run.glob("events.out.tfevents.*")]
    last: dict[str, float] = {}
    for _, numbers in table(run):
        last |= numbers
    given = {name: value for name, value in summary(run)["metrics"].items() if value is not None}
    assert given.items() <= last.items()


def test_trackers_change_neither_the_result_nor_what_counts_as_the_same_run(
    tmp_path: Path, whole: Callable[[str], str]
) -> None:
    assert fingerprint(train(tmp_path, *SIX, "logger=[tensorboard,csv]")) == whole("mha")
    keys = {settings_key(settings_of(name)) for name in ("logger=[]", "logger=[csv]")}
    assert len(keys) == 1
    train(tmp_path / "named", "logger=[csv]")
    (config,) = (tmp_path / "named" / "outputs" / "scratch").glob("*/config.yaml")
    assert re.fullmatch(r"mha_s1,.*", config.parent.name)
    assert "logger" not in config.parent.name


def settings_of(*overrides: str) -> dict[str, Any]:
    return asdict(settings(*overrides))


@pytest.mark.parametrize("step", [0, 3, 5])
def test_after_a_resume_the_table_has_each_row_once(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, "training_step", step, crash)
    assert command(tmp_path, *begun(tmp_path, "logger=[csv]")) == 1
    assert command(tmp_path, "resume=run") == 0
    run = tmp_path / "run"
    assert table(run) == recorded(run)
    assert [step for step, row in table(run) if "val/loss" in row] == [2, 4, 6]


def test_a_run_that_resumes_may_take_a_tracker_on_or_leave_it(tmp_path: Path) -> None:
    run = train(tmp_path, *SIX)
    more = ("resume=run", "validation.count=1")
    assert command(tmp_path, *more, "budget.steps=8", "logger=[csv]") == 0
    assert table(run) == recorded(run)
    before = table(run)
    assert command(tmp_path, *more, "budget.steps=9", "logger=[tensorboard]") == 0
    assert table(run) == before
    assert command(tmp_path, *more, "budget.steps=10", "logger=csv") == 0
    assert table(run) == recorded(run) != before
    assert command(tmp_path, *more, "logger=[cvs]") == 2


def test_what_a_tracker_has_is_not_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, step in enumerate((0, 3, 5)):  # dies, and goes on from step 0, 2 and 4
        once(monkeypatch, "training_step", step, crash)
        given = ["resume=run", PROBES[1]] if number else begun(tmp_path, *KEPT)
        assert command(tmp_path, *given) == 1
    assert command(tmp_path, "resume=run", PROBES[1]) == 0
    lines, run = kept(tmp_path / "run"), tmp_path / "run"
    assert only_rows(lines) == named(run)
    opened = [line for line in lines if line.startswith("open")]
    assert opened == ["open None", *["open an-id"] * 3]
    closed = [line for line in lines if line.startswith("close")]
    assert closed == [*["close failed"] * 3, "close success"]


def test_a_second_death_before_the_first_does_not_send_rows_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has the rows up to step 5; the second attempt's record ends at step 4, and drops them.
    for step in (5, 3):
        once(monkeypatch, "training_step", step, crash)
        resumes = (tmp_path / "run").exists()
        remove_newest(tmp_path / "run", 4)
        given = ["resume=run", PROBES[1]] if resumes else begun(tmp_path, *KEPT, "log_every=1")
        assert command(tmp_path, *given) == 1
    assert command(tmp_path, "resume=run", PROBES[1]) == 0
    found = only_rows(kept(tmp_path / "run"))
    assert sorted(found) == sorted(named(tmp_path / "run"))


def remove_newest(run: Path, step: int) -> None:
    for file in RunFolder(run).checkpoints.glob(f"step={step}.*"):
        file.unlink()


@pytest.mark.parametrize(
    ("fails", "has"), [("open", False), ("row 2", False), ("save", True), ("close", True)]
)
def test_a_tracker_that_fails_costs_one_line_and_nothing_else(
    fails: str,
    has: bool,
    tmp_path: Path,
    whole: Callable[[str], str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = train(tmp_path, *SIX, *KEPT, f"{FAILS}={fails}")
    assert capfd.readouterr().err.splitlines() == [
        "warning: logger: probe_kept: ConnectionError: no answer; the run goes on, and "
        "metrics.jsonl has all rows"
    ]
    assert fingerprint(run) == whole("mha")
    if has:
        assert only_rows(kept(run)) == named(run)


@pytest.mark.parametrize("row", ["row 3 ", "row 6 perf/"])  # the latter is the last
def test_what_a_tracker_missed_follows(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = [row]

    def note(self: probe_trackers.Lines, call: str, line: str) -> None:
        if missed and line.startswith(missed[0]):
            raise ConnectionError(missed.pop())
        original(self, call, line)

    original = probe_trackers.Lines.note
    monkeypatch.setattr(probe_trackers.Lines, "note", note)
    run = train(tmp_path, *SIX, *KEPT)
    assert only_rows(kept(run)) == named(run)
    assert [line for line in kept(run) if line.startswith("open")] == ["open None", "open an-id"]


def test_what_a_run_could_not_send_goes_when_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path, *SIX, *KEPT, f"{FAILS}=row 3")
    # Other settings may name another place, where the run begins anew.
    other = ("logger.probe_kept.place=other.txt", f"{FAILS}=null", "budget.steps=8", PROBES[1])
    assert command(tmp_path, "resume=run", *other) == 0
    lines = (run / "trackers" / "other.txt").read_text().splitlines()
    assert only_rows(lines) == named(run)
    assert lines[0] == "open None"


@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_a_run_does_not_wait_long_for_a_tracker_that_hangs(
    call: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Callable[[str], str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(feed, "OPENING", 0.01)
    monkeypatch.setattr(feed, "ENDING", 0.01)
    monkeypatch.setattr(probe_trackers, "RELEASE", probe_trackers.threading.Event())
    try:
        run = train(tmp_path, *SIX, *KEPT, f"{FAILS}='hangs in {call}'")
    finally:
        probe_trackers.RELEASE.set()
    assert fingerprint(run) == whole("mha")
    assert capfd.readouterr().err.splitlines() == [
        "warning: logger: probe_kept: is not done after 0.01 seconds; the run goes on, and "
        "metrics.jsonl has all rows"
    ]


def test_seeds_of_one_model_are_runs_of_their_own(tmp_path: Path) -> None:
    cfg = settings(*tiny(tmp_path, "logger=[csv]"))
    folders = {seed: tmp_path / f"s{seed}" for seed in (3, 1)}
    with process_state():
        assert train_seeds(check_run(cfg), folders, Console(quiet=True)) == {}
    for folder in folders.values():
        assert table(folder) == recorded(folder)
    assert table(folders[1]) != table(folders[3])


MISTAKES = {
    "logger=[cvs]": "'cvs' is unknown; did you mean csv? one of csv, mlflow, ",
    "logger=[csv,csv]": "csv is given twice; name each logger once",
    "logger=csv,wandb": "csv,wandb gives several choices; logger=[a,b] takes both",
    "+logger=[csv]": "already exists; write logger=... without the +",
    "logger=[probe_absent]": (
        "probe_absent needs the library no_such_library: pip install no_such_library"
    ),
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_written(
    override: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, *PROBES, override)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: logger: {MISTAKES[override]}")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("logger.csv.x=1", "logger.csv.x: needs the logger csv; give logger=[tensorboard,csv] as"),
        ("+logger.csv.x=1", "logger.csv: is not chosen; give logger=[csv] as well"),
    ],
)
def test_a_setting_of_a_logger_needs_the_logger(
    override: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, override)) == 2
    assert capfd.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("name", "wanted"), [("wandb", "wandb"), ("mlflow", "mlflow and sqlalchemy and alembic")]
)
def test_without_the_library_one_line_says_what_to_install(
    name: str,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tracker, "find_spec", lambda library: None)
    assert command(tmp_path, *tiny(tmp_path, f"logger=[{name}]")) == 2
    assert capfd.readouterr().err.splitlines() == [
        f"error: logger: {name} needs the library {wanted}: pip install 'gptattn[{name}]'"
    ]
