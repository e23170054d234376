"""The lines of a sweep that say how far it is and how long it will still take."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from gptattn.sweep.processes import Outcome, Work
from gptattn.sweep.sweep_progress import SweepProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list with the time in seconds, for the test to set."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def lines_of(works: list[Work], ends: dict[str, float], clock: list[float]) -> list[str]:
    """Return the lines of works whose processes end at these times, in this order."""
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    with SweepProgress(console, works, 1) as progress:
        for work in works:
            clock[0] = ends[work.folder.name]
            for folder in work.runs:
                progress.ended(work, Outcome(folder, 0, "", 1.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_time_left_is_that_of_the_speed_so_far_and_the_last_line_has_none(
    clock: list[float],
) -> None:
    # Weights whose sum, one by one, is not that of all at once in float64.
    works = [Work(Path(name), [], [], weight) for name, weight in (("a", 0.1), ("b", 0.7))]
    works.append(Work(Path("c"), [], [], 0.2))
    first, second, last = lines_of(works, {"a": 20.0, "b": 160.0, "c": 200.0}, clock)
    assert first == "[1/3] done a: 1 s; about 3 min left"
    assert second == "[2/3] done b: 1 s; about 40 s left"
    assert last == "[3/3] done c: 1 s"


def test_seeds_that_end_together_have_the_same_time_left(clock: list[float]) -> None:
    pair = Work(Path("a1"), [], [], 4.0, {Path("a2"): []})
    lines = lines_of([pair, Work(Path("b"), [], [], 4.0)], {"a1": 50.0, "b": 90.0}, clock)
    assert [line.partition("; ")[2] for line in lines] == ["about 50 s left"] * 2 + [""]
