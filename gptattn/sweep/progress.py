"""Shows how far a sweep is: one bar over all runs, and a line for each run that ends."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from gptattn.machine.console import span
from gptattn.runs.folder import RunFolder
from gptattn.runs.rows import share_done

BAR_SECONDS = 2.0  # between reads of the active runs' metrics.jsonl


class SweepProgress:
    """Shows `total` runs, `slots` at a time. The time left comes from the runs that have ended."""

    def __init__(self, console: Console, total: int, slots: int) -> None:
        self.console, self.total, self.slots = console, total, slots
        self._took: list[float] = []  # seconds of the runs that are done
        self._ended, self._failed, self._looked = 0, 0, 0.0
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
            self._bar.add_task("sweep", total=float(self.total), shown="")
            self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def ended(self, folder: Path, seconds: float) -> None:
        """Print a line with the run's loss and duration, or why it failed."""
        run = RunFolder(folder)
        self._ended += 1
        if run.done:
            self._took.append(seconds)
            loss = run.final_loss()
            end = f"done {folder.name}: {'' if loss is None else f'val loss {loss:.4f}, '}"
            end += span(seconds)
        else:
            self._failed += 1
            end = f"FAILED {folder.name}: {(run.read_failure() or {}).get('error', 'no summary')}"
        # Text keeps rich from reading a name or a reason as markup.
        self.console.print(Text(f"[{self._ended}/{self.total}] {end}{self._left()}"))

    def _left(self) -> str:
        runs = self.total - self._ended
        if not runs or not self._took:
            return ""
        rounds = -(-runs // self.slots)
        return f"; about {span(rounds * sum(self._took) / len(self._took))} left"

    def show(self, active: Sequence[Path]) -> None:
        """Update the bar from the active runs' records."""
        if self._bar is None or time.monotonic() - self._looked < BAR_SECONDS:
            return
        self._looked = time.monotonic()
        done = self._ended + sum(share_done(RunFolder(folder)) for folder in active)
        shown = f"{self._ended} of {self.total} runs"
        shown += f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._bar.task_ids[0], completed=done, shown=shown + self._left())
