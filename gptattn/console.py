"""The console, and the tables of what a run costs and comes to."""

import sys
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class StdoutConsole(Console):
    """Leaves it to whoever ends the process what becomes of a pipe that nobody reads any more."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """The one console. In a pipe a line is as long as it needs to be."""
    return StdoutConsole(
        width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True
    )


RESULTS = (
    "train/loss",
    "val/loss",
    "val/perplexity",
    "val/bits_per_byte",
    "perf/tokens_per_s",
    "perf/step_ms",
    "perf/mfu",
    "perf/peak_memory_mb",
    "perf/peak_memory_training_mb",
)


def span(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`, `5 d 6 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def metric_table(title: str, metrics: Mapping[str, float | None]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, _number(value))
    return table


def result_table(title: str, metrics: Mapping[str, float | None]) -> Table:
    """What a run came to: losses, speed and memory, then what the model costs."""
    costs = [name for name in metrics if name.startswith("cost/")]
    names = [name for name in RESULTS if name in metrics]  # of no steps there is no speed
    return metric_table(title, {name: metrics[name] for name in (*names, *costs)})


def _number(value: float | None) -> str:
    if value is None:
        return "null"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
