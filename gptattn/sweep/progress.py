"""What a person sees while a sweep runs: one bar over all runs, or a line for each that ends."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from gptattn.sweep.processes import Outcome, Work

LOOK_SECONDS = 2.0  # between looks into the records of what runs
LAST_BYTES = 8192


def span(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class SweepProgress:
    """Shows how far a sweep is, by the expected seconds of its runs; corrects the expectation."""

    def __init__(self, console: Console, works: Sequence[Work], slots: int) -> None:
        self.console, self.slots = console, slots
        self.total, self.ended_runs, self.failed = len(works), 0, 0
        self._expected = sum(work.weight for work in works)
        self._done = 0.0  # expected seconds of what has ended
        self._start = time.monotonic()
        self._looked = 0.0
        self._bar: Progress | None = None

    def __enter__(self) -> "SweepProgress":
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[shown]}"),
                console=self.console,
                refresh_per_second=2,
                transient=True,
            )
            self._bar.add_task("sweep", total=1.0, shown="")
            self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, work: Work) -> None:
        self._update([work])

    def running(self, works: Sequence[Work]) -> None:
        if self._bar is not None and time.monotonic() - self._looked > LOOK_SECONDS:
            self._update(works)

    def ended(self, work: Work, outcome: Outcome) -> None:
        self.ended_runs += 1
        self.failed += not outcome.done
        self._done += work.weight
        end = f"{_loss(outcome.folder)}{span(outcome.seconds)}" if outcome.done else outcome.reason
        state = "done" if outcome.done else "FAILED"
        line = f"[{self.ended_runs}/{self.total}] {state} {work.folder.name}: {end}"
        left = self._left(self._done)
        # Text, so that nothing in a name or a reason is taken for markup.
        self.console.print(Text(line + (f"; about {span(left)} left" if left else "")))

    def _update(self, works: Sequence[Work]) -> None:
        self._looked = time.monotonic()
        if self._bar is None:
            return
        done = self._done + sum(work.weight * share_done(work.folder) for work in works)
        shown = f"{self.ended_runs} of {self.total} runs"
        shown += f", {self.failed} failed" if self.failed else ""
        left = self._left(done)
        shown += f", about {span(left)} left" if left else ""
        self._bar.update(self._bar.task_ids[0], completed=done / self._expected, shown=shown)

    def _left(self, done: float) -> float:
        """Seconds left, at the speed so far; before anything is done, at the expected one."""
        elapsed = time.monotonic() - self._start
        per_expected = elapsed / done if done else 1 / self.slots
        return (self._expected - done) * per_expected


def share_done(folder: Path) -> float:
    """How much of its budget a run has used, by the newest row of its record; 0 without one."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0.0
    for line in reversed(lines):
        try:
            return float(json.loads(line)["progress/budget"])
        except (ValueError, LookupError, TypeError):
            continue
    return 0.0


def _loss(folder: Path) -> str:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return f"val loss {summary['metrics']['val/loss']:.4f}, "
    except (OSError, ValueError, LookupError, TypeError):
        return ""
