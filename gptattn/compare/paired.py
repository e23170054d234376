"""Differences in loss, paired by seed, and their correction over a family of comparisons."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gptattn.compare import statistics
from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import Groups
from gptattn.compare.results import Difference
from gptattn.runs.two_stages import FirstStage


@dataclass(frozen=True)
class Paired:
    """Values at the seeds that several groups have in common.

    `first`: how many of these belong to the first stage of `sweep.until`, which stand first; None:
    no spread over seeds decided how many there are. `asked`: half of the interval that it asks for.
    """

    values: np.ndarray  # [groups, n], or [n] for one value of each seed
    first: int | None = None
    asked: float | None = None
    unpaired: float = 0.0  # standard deviation of a difference of groups that share no seed

    def of(self, change: Callable[[np.ndarray], np.ndarray]) -> "Paired":
        """Return what `change` makes of the values."""
        return replace(self, values=change(self.values))


def paired(groups: Sequence[Sequence[Run]], metric: str = "val/loss") -> Paired:
    """Return the metric of each group at the seeds that all of them have, [groups, n]."""
    found = [
        {run.seed: run.metrics[metric] for run in runs if metric in run.metrics} for runs in groups
    ]
    stage = _stage(groups)
    first = {*stage.first} if stage else set[int]()
    common = set.intersection(*(set(values) for values in found))
    seeds = sorted(common, key=lambda seed: (seed not in first, seed))
    values = np.array([[values[seed] for seed in seeds] for values in found])
    count = len(common & first)
    # One seed of the first stage tells no deviation.
    asked = stage.half_width if stage else None
    unpaired = math.sqrt(values.var(axis=1, ddof=1).sum()) if len(common) > 1 else 0.0
    return Paired(values, count if 1 < count < len(common) else None, asked, unpaired)


def _stage(groups: Sequence[Sequence[Run]]) -> FirstStage | None:
    """Return the first stage of `sweep.until`, if all of these runs began with the same seeds.

    Of several widths that were asked for, the smallest counts.
    """
    stages = {run.stage for runs in groups for run in runs}
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages) or len({stage.first for stage in known}) != 1:
        return None
    return min(known, key=lambda stage: stage.half_width)


def compare_all(
    groups: Groups, names: Sequence[str], baseline: str, comparisons: int | None = None
) -> list[Difference]:
    """Return each named group's validation loss minus the baseline's, paired by seed.

    Groups without a seed in common with the baseline are left out. See `family` for `comparisons`.
    """
    return compare_pairs(groups, [(baseline, name) for name in names], comparisons)


def compare_pairs(
    groups: Groups, names: Sequence[tuple[str, str]], comparisons: int | None = None
) -> list[Difference]:
    """Return the second group's loss minus the first's for each pair with a seed in common.

    See `family` for `comparisons`.
    """
    pairs = {pair: paired([groups[name] for name in pair]) for pair in names}
    return family(
        {pair: found.of(second_minus_first) for pair, found in pairs.items()}, comparisons
    )


def second_minus_first(values: np.ndarray) -> np.ndarray:
    """Return the difference [n] of values [2, n]."""
    return values[1] - values[0]


def family(
    differences: Mapping[tuple[str, str], Paired], comparisons: int | None = None
) -> list[Difference]:
    """Return the statistics of differences by seed [n], by (baseline, variant); none for n = 0.

    The correction is over `comparisons`; by default, the differences with two or more seeds.
    """
    m = comparisons or sum(d.values.size > 1 for d in differences.values())
    return [
        _difference(name, baseline, d, m)
        for (baseline, name), d in differences.items()
        if d.values.size
    ]


def _difference(name: str, baseline: str, found: Paired, comparisons: int) -> Difference:
    """Return the statistics of the paired differences [n]."""
    d, first = found.values, found.first
    n, mean = len(d), float(d.mean())
    plain = Difference(
        name, baseline, n, mean, 0.0, None, None, comparisons, None, first, found.asked
    )
    if statistics.all_equal(d[:first]):
        return plain
    deviation = statistics.deviation(d, first)
    return replace(
        plain,
        deviation=deviation,
        paired=statistics.deviation(d),
        unpaired=found.unpaired,
        interval=statistics.t_interval(d, comparisons, first),
        p=statistics.paired_p(d, comparisons, first),
        seeds_needed=statistics.seeds_needed(mean, deviation, comparisons),
    )
