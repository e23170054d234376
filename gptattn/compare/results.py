"""The aggregate: what every output of the report is made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gptattn.compare import statistics
from gptattn.compare.curves import Curves
from gptattn.compare.finished_runs import Run
from gptattn.compare.statistics import Interval

# What a row of the report holds beside the loss, in its order.
METRICS = (
    "val/loss",
    "val/bits_per_byte",
    "perf/tokens_per_s",
    "perf/step_ms",
    "cost/params",
    "cost/params_attention",
    "cost/flops_per_token",
    "cost/kv_bytes_per_token",
    "perf/peak_memory_training_mb",
)
COSTS = {
    "params": "cost/params",
    "cache": "cost/kv_bytes_per_token",
    "speed": "perf/tokens_per_s",
}


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds with Student's 95% interval; n = 1 has none."""

    n: int
    mean: float
    interval: Interval | None


@dataclass(frozen=True)
class Difference:
    """One variant's validation loss minus another's, over the seeds that both have.

    Interval and p are those that the correction over `comparisons` leaves; None where the
    differences have no spread to judge chance by: a single one, or equal ones.
    """

    variant: str
    baseline: str
    n: int
    mean: float
    deviation: float  # of the differences over seeds; 0 without a spread
    interval: Interval | None
    p: float | None  # two-sided, at most 1
    comparisons: int
    seeds_needed: int | None  # None: more than 1,000, or no spread

    @property
    def shown(self) -> bool:
        """Whether the runs support a difference: the interval leaves 0 out."""
        return self.p is not None and self.p < statistics.ALPHA


@dataclass(frozen=True)
class Row:
    """One variant: runs that differ in nothing but the seed."""

    name: str
    runs: list[Run]
    metrics: dict[str, Estimate]  # those that any of its runs has
    difference: Difference | None  # to the baseline; None for itself, or without a common seed
    speed: tuple[float, Interval] | None  # tokens/s over the baseline's, paired by seed
    fronts: list[str]  # the costs on whose Pareto front it lies

    @property
    def n(self) -> int:
        return len(self.runs)

    @property
    def loss(self) -> float:
        return self.metrics["val/loss"].mean

    def mean(self, metric: str) -> float | None:
        return self.metrics[metric].mean if metric in self.metrics else None


@dataclass(frozen=True)
class Section:
    """Rows that can be compared with each other."""

    title: str  # what sets it apart from other sections; "" for the only one
    baseline: str
    rows: list[Row]  # the baseline first, the others by loss
    leader: str | None  # the lowest mean loss; None with one row
    rivals: list[Difference]  # of each other row to the leader
    alike: list[str]  # rows that the leader cannot be told apart from
    warnings: list[str]
    size: str = ""  # of the model, where sections differ in it
    family: str = ""  # the rest of the title: sections of one family differ in size, or share
    share: float | None = None  # of the originals' steps, where these rows were made of others
    pairs: list[Difference] = field(default_factory=list)  # of theirs, corrected apart
    from_scratch: list[Row] = field(default_factory=list)  # the same variants, compared elsewhere


@dataclass(frozen=True)
class Comparison:
    """The whole report."""

    folders: list[str]
    sections: list[Section]
    warnings: list[str]
    passed_over: list[str]
    curves: Mapping[Path, Curves]  # by run folder

    @property
    def runs(self) -> list[Run]:
        """Each once: what others were made of stands in several sections."""
        runs = [run for section in self.sections for row in section.rows for run in row.runs]
        return list({(run.folder, run.until): run for run in runs}.values())
