"""Shows the progress of a sweep: one bar over all runs, and a line for each run that ends."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from gptattn.machine.console import span
from gptattn.runs.folder import RunFolder
from gptattn.runs.rows import share_done
from gptattn.sweep.processes import Outcome, Work

T = TypeVar("T")
LINE_SECONDS = 5.0  # between the lines of `counted`
LOOK_SECONDS = 2.0  # between reads of the active runs' metrics.jsonl


def counted(items: Iterable[T], total: int, what: str, console: Console) -> Iterator[T]:
    """Yield the items; if they come slowly, print every LINE_SECONDS how many there are."""
    last = time.monotonic()
    for i, item in enumerate(items):
        if time.monotonic() - last > LINE_SECONDS:
            console.print(f"{what}: {i:,} of {total:,}")
            last = time.monotonic()
        yield item


class SweepProgress:
    """A `Watcher` that shows how far a sweep is and how long it will still take.

    Progress counts the expected seconds of the runs; the time left is scaled by the speed so far.
    """

    def __init__(
        self, console: Console, works: Sequence[Work], slots: int, *, known: bool = True
    ) -> None:
        """`known`: each job's weight is its expected seconds. Otherwise all weights are equal."""
        self.console, self.slots, self._known = console, slots, known
        self.total, self.ended_runs, self.failed = sum(len(work.runs) for work in works), 0, 0
        self._expected = sum(work.weight for work in works)
        self._done = 0.0  # expected seconds of the works that have ended
        self._last: Work | None = None  # that has ended; its runs end together
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
        """Update the bar for a run that starts."""
        self._update([work])

    def running(self, works: Sequence[Work]) -> None:
        """Update the bar from the active runs' records, at most every LOOK_SECONDS."""
        if self._bar is not None and time.monotonic() - self._looked > LOOK_SECONDS:
            self._update(works)

    def ended(self, work: Work, outcome: Outcome) -> None:
        """Print a line with the run's loss and duration, or why it failed."""
        self.ended_runs += 1
        self.failed += not outcome.done
        if work is not self._last:
            self._last, self._done = work, self._done + work.weight
        end = f"{_loss(outcome.folder)}{span(outcome.seconds)}" if outcome.done else outcome.reason
        end += f", on {outcome.host}" if outcome.host else ""
        state = "done" if outcome.done else "FAILED"
        line = f"[{self.ended_runs}/{self.total}] {state} {outcome.folder.name}: {end}"
        left = self._left(self._done) if self.ended_runs < self.total else 0.0
        # Text keeps rich from reading a name or a reason as markup.
        self.console.print(Text(line + (f"; about {span(left)} left" if left else "")))

    def retrying(self, works: Sequence[Work]) -> None:
        """Count these runs as unfinished again: they ended out of memory and are repeated."""
        if works:
            self.ended_runs -= len(works)
            self.failed -= len(works)
            self._expected += sum(work.weight for work in works)
            names = ", ".join(work.folder.name for work in works)
            self.console.print(Text(f"out of memory; retrying one at a time: {names}"))

    def _update(self, works: Sequence[Work]) -> None:
        self._looked = time.monotonic()
        if self._bar is None:
            return
        done = self._done + sum(work.weight * share_done(RunFolder(work.folder)) for work in works)
        shown = f"{self.ended_runs} of {self.total} runs"
        shown += f", {self.failed} failed" if self.failed else ""
        left = self._left(done)
        shown += f", about {span(left)} left" if left else ""
        self._bar.update(self._bar.task_ids[0], completed=done / self._expected, shown=shown)

    def _left(self, done: float) -> float:
        """Return the seconds left at the speed so far, given the expected seconds `done`.

        Before anything is done, use the expected speed; return 0 if that is unknown.
        """
        if not done and not self._known:
            return 0.0
        elapsed = time.monotonic() - self._start
        per_expected = elapsed / done if done else 1 / self.slots
        return max(0.0, self._expected - done) * per_expected


def _loss(folder: Path) -> str:
    loss = RunFolder(folder).final_loss()
    return "" if loss is None else f"val loss {loss:.4f}, "
