"""Differences in loss, paired by seed, and their correction over a family of comparisons."""

from collections.abc import Mapping, Sequence

import numpy as np

from gptattn.compare import statistics
from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import Groups
from gptattn.compare.results import Difference


def paired(groups: Sequence[Sequence[Run]], metric: str = "val/loss") -> np.ndarray:
    """Return the metric of each group at the seeds that all of them have, [groups, n]."""
    found = [
        {run.seed: run.metrics[metric] for run in runs if metric in run.metrics} for runs in groups
    ]
    seeds = sorted(set.intersection(*(set(values) for values in found)))
    return np.array([[values[seed] for seed in seeds] for values in found])


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
    return family({pair: theirs - first for pair, (first, theirs) in pairs.items()}, comparisons)


def family(
    differences: Mapping[tuple[str, str], np.ndarray], comparisons: int | None = None
) -> list[Difference]:
    """Return the statistics of differences by seed [n], by (baseline, variant); none for n = 0.

    The correction is over `comparisons`; by default, the differences with two or more seeds.
    """
    m = comparisons or sum(len(d) > 1 for d in differences.values())
    return [
        _difference(name, baseline, d, m) for (baseline, name), d in differences.items() if len(d)
    ]


def _difference(name: str, baseline: str, d: np.ndarray, comparisons: int) -> Difference:
    """Return the statistics of the paired differences [n]."""
    n, mean = len(d), float(d.mean())
    if statistics.all_equal(d):
        return Difference(name, baseline, n, mean, 0.0, None, None, comparisons, None)
    deviation = float(d.std(ddof=1))
    return Difference(
        name,
        baseline,
        n,
        mean,
        deviation,
        statistics.t_interval(d, comparisons),
        statistics.paired_p(d, comparisons),
        comparisons,
        statistics.seeds_needed(mean, deviation, comparisons),
    )
