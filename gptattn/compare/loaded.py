"""The comparison as a Python object: plain rows, and pandas DataFrames of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.results import METRICS, Comparison, Row, Section
from gptattn.errors import ConfigError

LOSS = "val/loss"


@dataclass(frozen=True)
class Loaded:
    """Finished runs, compared. What is missing is None in the rows, and NaN in a DataFrame."""

    comparison: Comparison

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict per variant and section: loss, its interval, difference, and costs.

        `loss` is the mean over `n` seeds, in nats per token, and `low` to `high` Student's 95%
        interval. `difference` is the mean of the paired differences to `baseline`, over `paired_n`
        seeds; its interval and `p` have a Bonferroni correction over the section's comparisons.
        Costs are means over the seeds, under the names that the metrics have in a run's record.
        """
        return [_row(section, row) for section in self.comparison.sections for row in section.rows]

    def run_rows(self) -> list[dict[str, Any]]:
        """Return a dict per run: variant, seed, folder, and the run's own metrics."""
        return [
            {"section": section.title, "variant": row.name, "seed": run.seed}
            | {"folder": str(run.folder), "loss": run.metrics[LOSS]}
            | {metric: run.metrics.get(metric) for metric in METRICS if metric != LOSS}
            for section in self.comparison.sections
            for row in section.rows
            for run in row.runs
        ]

    def table(self) -> Any:
        """Return `rows` as a pandas DataFrame. Raises ConfigError if pandas is not installed."""
        return _frame(self.rows())

    def runs(self) -> Any:
        """Return `run_rows` as a pandas DataFrame. Raises ConfigError as `table` does."""
        return _frame(self.run_rows())


def loaded(folders: Sequence[str | PathLike[str]], baseline: str | None, split: bool) -> Loaded:
    """Read and compare the runs; see `gptattn.compare.load`."""
    paths = [Path(folder) for folder in folders] or [Path("outputs")]
    runs, passed_over = read_runs(paths)
    names = [str(path) for path in paths]
    return Loaded(
        compare(runs, folders=names, baseline=baseline, split=split, passed_over=passed_over)
    )


def _row(section: Section, row: Row) -> dict[str, Any]:
    low, high = row.metrics[LOSS].interval or (None, None)
    d = row.difference
    d_low, d_high = (d and d.interval) or (None, None)
    return {
        "section": section.title,
        "variant": row.name,
        "n": row.n,
        "loss": row.loss,
        "low": low,
        "high": high,
        "baseline": section.baseline,
        "paired_n": d and d.n,
        "difference": d and d.mean,
        "difference_low": d_low,
        "difference_high": d_high,
        "p": d and d.p,
        "shown": d and d.shown,
        **{metric: row.mean(metric) for metric in METRICS if metric != LOSS},
    }


def _frame(rows: list[dict[str, Any]]) -> Any:
    # By name: types are checked without pandas, too.
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise ConfigError(
            "pandas",
            "is not installed; pip install 'gptattn[table]', or use rows() and run_rows()",
        ) from None
    return pandas.DataFrame(rows)
