"""The Comparison: the data that table, page, CSV, JSON and plots are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gptattn.compare import statistics
from gptattn.compare.curves import Curves
from gptattn.compare.finished_runs import Run
from gptattn.compare.ladder import LadderReport
from gptattn.compare.statistics import Interval

# The metrics of a row, in the report's order.
METRICS = (
    "val/loss",
    "val/accuracy",
    "val/bits_per_byte",
    "perf/tokens_per_s",
    "perf/step_ms",
    "cost/params",
    "cost/params_attention",
    "cost/flops_per_token",
    "cost/kv_bytes_per_token",
    "perf/peak_memory_training_mb",
)
OF_DATA = ("val/accuracy", "val/bits_per_byte")  # of a task, and of a text
COSTS = {
    "params": "cost/params",
    "cache": "cost/kv_bytes_per_token",
    "flops": "cost/flops_per_token",
    "speed": "perf/tokens_per_s",
}


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds with Student's 95% interval; None for n = 1."""

    n: int
    mean: float
    interval: Interval | None


@dataclass(frozen=True)
class Difference:
    """A variant's validation loss minus the baseline's, in nats, over the seeds that both have.

    Interval and p are corrected for `comparisons`. Both are None if the differences have no
    spread: there is a single one, or all are equal.
    """

    variant: str
    baseline: str
    n: int
    mean: float
    deviation: float  # standard deviation of the differences over seeds, nats; 0 without spread
    interval: Interval | None
    p: float | None  # two-sided, at most 1
    comparisons: int
    seeds_needed: int | None  # for 80% power at this mean; None: more than 1,000, or no spread
    first: int | None = None  # of the n, the first stage of `sweep.until`; None: there is no second
    asked: float | None = None  # half of the interval that `sweep.until` asks for, nats
    paired: float = 0.0  # standard deviation of the differences over all n
    unpaired: float = 0.0  # what it would be if the two had no seed in common

    @property
    def shown(self) -> bool:
        """Whether the runs show a difference: the interval excludes 0."""
        return self.p is not None and self.p < statistics.ALPHA


@dataclass(frozen=True)
class Row:
    """One variant: runs that differ only in the seed."""

    name: str
    runs: list[Run]
    metrics: dict[str, Estimate]  # those that at least one of its runs has
    difference: Difference | None  # to the baseline; None for itself or without a common seed
    speed: tuple[float, Interval] | None  # tokens/s over the baseline's, paired by seed
    fronts: list[str]  # keys of COSTS: the Pareto fronts that it is on

    @property
    def n(self) -> int:
        """Number of runs, one per seed."""
        return len(self.runs)

    @property
    def loss(self) -> float:
        """Mean validation loss, nats per token."""
        return self.metrics["val/loss"].mean

    def mean(self, metric: str) -> float | None:
        """Return the metric's mean over the runs; None if no run has it."""
        return self.metrics[metric].mean if metric in self.metrics else None


@dataclass(frozen=True)
class Section:
    """Rows that can be compared with each other."""

    title: str  # how it differs from other sections; "" for the only one
    baseline: str
    rows: list[Row]  # the baseline first, the others by loss
    leader: str | None  # the row with the lowest mean loss; None with one row
    rivals: list[Difference]  # of each other row to the leader
    alike: list[str]  # rows not shown to differ from the leader
    warnings: list[str]
    size: str = ""  # the part of the title on the model's size
    family: str = ""  # the rest of the title: sections of one family differ in size only


@dataclass(frozen=True)
class Change:
    """A figure in two sections: means over the seeds in common, second minus first."""

    first: float
    second: float
    difference: Difference


@dataclass(frozen=True)
class Across:
    """What changes between two sections that differ in one setting alone, by name of row.

    Each of the two families has a correction of its own. Between tokenizers the rows may be the
    baseline alone, and then there are no gaps.
    """

    setting: str  # the axis of sections.AXES
    where: str  # what else parts these two from other sections; "" for nothing
    first: str  # title of the first section, in this setting
    second: str
    baseline: str  # of both
    losses: Mapping[str, Change]  # of the rows that both have: the baseline, then by first loss
    gaps: Mapping[str, Change]  # loss minus the baseline's
    others: list[str]  # further settings that differ between the two sections' rows
    metric: str = "val/loss"  # of `losses`, in nats; between tokenizers val/bits_per_byte
    token_bytes: tuple[float, float] | None = None  # in each, between tokenizers


@dataclass(frozen=True)
class Comparison:
    """The whole report."""

    folders: list[str]
    sections: list[Section]
    warnings: list[str]
    passed_over: list[str]
    curves: Mapping[Path, Curves]  # by run folder
    across: list[Across] = field(default_factory=list)
    ladders: list[LadderReport] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """All runs, each once: an extended run may be in several sections."""
        runs = [run for section in self.sections for row in section.rows for run in row.runs]
        return list({(run.folder, run.until): run for run in runs}.values())
