"""Console output of a run: a progress bar on a terminal, plain lines elsewhere; then tables."""

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from gptattn.machine.console import format_duration, make_printable
from gptattn.runs.metrics import ACCURACY, BITS, CACHE, LOSS, SPEED, STEP_MS, TRAIN_LOSS
from gptattn.training.callbacks import Samples, StepClock
from gptattn.training.preflight import PreparedRun

LINE_SECONDS = 4.0  # between plain lines
RESULTS = (TRAIN_LOSS, "val/", "perf/", "cost/")  # beginnings of the names in a table


class ConsoleProgress(L.Callback):
    """Shows progress, losses and samples. Must come after `MetricRows`, which updates the state."""

    def __init__(
        self, prepared: PreparedRun, console: Console, clock: StepClock, samples: Samples
    ) -> None:
        self.state, self.budget = prepared.state, prepared.budget
        self.console, self.clock, self.samples = console, clock, samples
        cfg, self.count = prepared.cfg, prepared.cfg.validation.count
        # A validation's time in steps: it only runs forward, a third of a step's time.
        trained, scored = cfg.batch_size * cfg.model.context_length, prepared.data.facts()
        self.per_validation = scored.get("val_tokens", 0) / (3 * trained)
        self._bar: Progress | None = None
        self._last_line = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[shown]}"),
                console=self.console,
                refresh_per_second=4,
                transient=True,
            )
            self._bar.add_task("training", total=1.0, shown="")
            self._bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if TRAIN_LOSS not in self.state.last:
            return  # the first step is not complete
        seconds = self.clock.now()
        done = self.budget.progress(trainer.global_step, seconds)
        validating = (self.count - int(done * self.count)) * self.per_validation
        soon = seconds * validating / trainer.global_step
        left = f"{format_duration(seconds * (1 - done) / done + soon)} left" if done else ""
        if self._bar is not None:
            shown = f"{self._describe(trainer)}  {left}"
            self._bar.update(self._bar.task_ids[0], completed=done, shown=shown)
        elif time.monotonic() - self._last_line > LINE_SECONDS:
            self.console.print(f"{self._describe(trainer)}  {done:4.0%}  {left}")
            self._last_line = time.monotonic()

    def _describe(self, trainer: L.Trainer) -> str:
        total = "" if self.budget.steps is None else f"/{self.budget.steps}"
        last = self.state.last
        line = f"step {trainer.global_step}{total}  loss {last[TRAIN_LOSS]:.3f}"
        if LOSS in last:
            line += f"  val {last[LOSS]:.3f}"
        if ACCURACY in last:
            line += f"  accuracy {last[ACCURACY]:.3f}"
        line += f"  {last[SPEED]:,.0f} tokens/s"
        step = last[STEP_MS] or 0.0
        return f"{line}  {step / 1e3:.1f} s/step" if step >= 1e3 else line

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        last = self.state.last
        train = f"train loss {last[TRAIN_LOSS]:.4f}  " if TRAIN_LOSS in last else ""
        on_task = ACCURACY in last
        figure = f"accuracy {last[ACCURACY]:.4f}" if on_task else f"{last[BITS]:.3f} bits/byte"
        self.console.print(
            f"[bold]step {trainer.global_step}[/bold]  {train}val loss {last[LOSS]:.4f}  {figure}"
        )
        if self.samples.text:
            text = Text(make_printable(self.samples.text))
            self.console.print(Panel(text, title="sample", title_align="left"))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    on_exception = on_train_end  # after an exception, Lightning does not call on_train_end


def make_table(title: str, metrics: Mapping[str, float | None]) -> Table:
    """Return a table with one row per metric of RESULTS, in that order; None is shown as null."""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name in [name for kind in RESULTS for name in metrics if name.startswith(kind)]:
        value = metrics[name]
        if value is None:
            shown = "no cache" if name == CACHE else "null"
        elif abs(value) >= 1000 or value == int(value):
            shown = f"{value:,.0f}"
        else:
            shown = f"{value:.4g}"
        table.add_row(name, shown)
    return table
