"""Console tables of a run's costs and results."""

from collections.abc import Mapping

from rich import box
from rich.markup import escape
from rich.table import Table

RESULTS = (
    "train/loss",
    "val/loss",
    "val/perplexity",
    "val/bits_per_byte",
    "val/accuracy",
    "perf/tokens_per_s",
    "perf/step_ms",
    "perf/mfu",
    "perf/peak_memory_mb",
    "perf/peak_memory_training_mb",
)


def metric_table(title: str, metrics: Mapping[str, float | None]) -> Table:
    """Return a table with one row per metric, in the given order; None is shown as null."""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, _number(value))
    return table


def result_table(title: str, metrics: Mapping[str, float | None]) -> Table:
    """Return the table of a run's results: losses, speed and memory, then the model's costs."""
    costs = [name for name in metrics if name.startswith("cost/")]
    names = [name for name in RESULTS if name in metrics]  # a run of 0 steps has no speed
    return metric_table(title, {name: metrics[name] for name in (*names, *costs)})


def _number(value: float | None) -> str:
    if value is None:
        return "null"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
