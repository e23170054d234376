"""The report's statistics over seeds: functions of arrays, then of runs paired by seed.

One procedure decides: Student's t on differences paired by seed, with Bonferroni's correction over
the comparisons of a family. The interval shown is the corrected one, so a difference is stated
exactly when its interval excludes 0. If the spread over the first seeds decided how many to run,
`first` is their number. The deviation and its degrees of freedom then come from those seeds alone,
so that the confidence is as stated. Source: Stein 1945, Ann. Math. Statist. 16, 243-258.

scipy is imported inside functions: it takes half a second, and mistakes must be reported first.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gptattn.compare.finished_runs import Run
from gptattn.runs.metrics import LOSS
from gptattn.runs.two_stages import FirstStage

Interval = tuple[float, float]
Array = NDArray[np.float64]

ALPHA = 0.05
POWER = 0.8
SEEDS_CAP = 1_000
CHI_PARTS = 200  # quantiles of equal probability; they make the power accurate to 0.001
# Differences within this range, in nats, are equal: losses have float32 precision.
RESOLUTION = 1e-6


def t_interval(
    values: ArrayLike, comparisons: int = 1, first: int | None = None
) -> Interval | None:
    """Return Student's interval for the mean of `values` [n]; None for n < 2.

    The confidence is 95% over all comparisons together. With `first`, the interval is Stein's, and
    the values of the first stage come first.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    half = critical_t(first or len(x), comparisons) * deviation(x, first) / math.sqrt(len(x))
    return float(x.mean() - half), float(x.mean() + half)


def deviation(values: ArrayLike, first: int | None = None) -> float:
    """Return the standard deviation of `values` [n], or of the first `first` of them."""
    return float(np.asarray(values, dtype=np.float64)[:first].std(ddof=1))


@cache
def critical_t(n: int, comparisons: int = 1) -> float:
    """Return the two-sided critical t for n values at level 5% / comparisons (Bonferroni).

    Source: Dunn 1961, Journal of the American Statistical Association 56, 52-64.
    """
    from scipy.special import stdtrit

    return float(-stdtrit(n - 1, ALPHA / comparisons / 2))


def paired_p(differences: ArrayLike, comparisons: int = 1, first: int | None = None) -> float:
    """Return the two-sided p of the mean of paired differences [n], times comparisons, at most 1.

    It is below 5% exactly when `t_interval` of the same arguments excludes 0.
    """
    from scipy.special import stdtr

    d = np.asarray(differences, dtype=np.float64)
    t = d.mean() / deviation(d, first) * math.sqrt(len(d))
    return min(1.0, 2 * comparisons * float(stdtr((first or len(d)) - 1, -abs(t))))


def power(effect: float, n: int, comparisons: int = 1) -> float:
    """Return the probability that n seeds show a true difference of `effect` standard deviations.

    Source: Cohen 1988, Statistical Power Analysis, sec. 2.3. The noncentral t is computed as a mean
    over the chi distribution of the sample deviation, because scipy's returns NaN for few seeds.
    """
    from scipy.special import ndtr

    reach = critical_t(n, comparisons) * _deviations(n)
    shift = abs(effect) * math.sqrt(n)
    return float(np.mean(ndtr(shift - reach) + ndtr(-shift - reach)))


@cache
def _deviations(n: int) -> Array:
    """Return quantiles of (sample / true standard deviation) of n normal values, [CHI_PARTS]."""
    from scipy.special import chdtri

    return np.sqrt(chdtri(n - 1, (np.arange(CHI_PARTS) + 0.5) / CHI_PARTS) / (n - 1))


def seeds_needed(difference: float, deviation: float, comparisons: int = 1) -> int | None:
    """Return the fewest seeds that show a true `difference` with 80% power; None above SEEDS_CAP.

    `deviation` is the standard deviation of the paired differences, above 0.
    """
    effect = difference / deviation
    counts = range(2, SEEDS_CAP + 1)
    i = bisect_left(counts, POWER, key=lambda n: power(effect, n, comparisons))
    return counts[i] if i < len(counts) else None


def stein_seeds(deviation: float, half_width: float, first: int, comparisons: int = 1) -> int:
    """Return how many seeds an interval of the mean +- `half_width` needs, by Stein's two stages.

    `deviation` is the standard deviation of the paired differences over the first stage's `first`
    seeds, at least 2. These count, so the answer is never below `first`. The interval is
    `t_interval`'s with `first`.
    Source: Stein 1945, Annals of Mathematical Statistics 16, 243-258.
    """
    return max(first, math.ceil((critical_t(first, comparisons) * deviation / half_width) ** 2))


def pareto_front(costs: ArrayLike, losses: ArrayLike) -> list[int]:
    """Return the indices of the points on the Pareto front; lower is better in both.

    No other point has a lower cost at the same or a lower loss, or a lower loss at the same cost.
    """
    cost, loss = np.asarray(costs, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    no_worse = (cost <= cost[:, None]) & (loss <= loss[:, None])  # [point, other]
    better = (cost < cost[:, None]) | (loss < loss[:, None])
    return np.flatnonzero(np.isfinite(cost) & ~(no_worse & better).any(axis=1)).tolist()


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds (a speed: rounds), with its 95% interval; None: unknown."""

    n: int
    mean: float
    interval: Interval | None


def estimate(values: ArrayLike) -> Estimate:
    """Return the mean of `values` [n], n > 0, with its interval."""
    x = np.asarray(values, dtype=np.float64)
    return Estimate(len(x), float(x.mean()), t_interval(x))


@dataclass(frozen=True)
class Difference:
    """A variant's validation loss minus the baseline's, in nats, over the seeds that both have.

    Interval and p are corrected for `comparisons`. Both are None if the differences have no spread,
    because there is only one or all are equal.
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
    first: int | None = None  # seeds in the first stage of `sweep.until`; None: no second stage
    target_half_width: float | None = None  # half-width that `sweep.until` asks for, nats

    @property
    def is_significant(self) -> bool:
        """Whether the runs show a difference: the interval excludes 0."""
        return self.p is not None and self.p < ALPHA


@dataclass(frozen=True)
class PairedValues:
    """Values at the seeds that several groups share.

    `first`: how many of these seeds, at the start, are the first stage of `sweep.until`; None: the
    number of seeds did not depend on results. `target_half_width`: the half-width that it asks for.
    """

    values: Array  # [groups, n]
    first: int | None = None
    target_half_width: float | None = None


def pair_by_seed(groups: Sequence[Sequence[Run]]) -> PairedValues:
    """Return each group's losses at the seeds that all share, [groups, n]."""
    found = [{run.seed: run.metrics[LOSS] for run in runs} for runs in groups]
    stage = _stage(groups)
    first = {*stage.first} if stage else set[int]()
    common = set.intersection(*(set(values) for values in found))
    seeds = sorted(common, key=lambda seed: (seed not in first, seed))
    values = np.array([[values[seed] for seed in seeds] for values in found])
    count = len(common & first)
    # One seed of the first stage gives no deviation.
    half_width = stage.half_width if stage else None
    return PairedValues(values, count if 1 < count < len(common) else None, half_width)


def _stage(groups: Sequence[Sequence[Run]]) -> FirstStage | None:
    """Return the first stage of `sweep.until` if all of these runs began with the same seeds.

    If they ask for several widths, the smallest counts.
    """
    stages = {run.stage for runs in groups for run in runs}
    found_stages = [stage for stage in stages if stage is not None]
    if len(found_stages) < len(stages) or len({stage.first for stage in found_stages}) != 1:
        return None
    return min(found_stages, key=lambda stage: stage.half_width)


def compare_family(
    groups: Mapping[str, Sequence[Run]],
    reference: str,
    names: Sequence[str],
    comparisons: int | None = None,
) -> dict[str, Difference]:
    """Return the difference of each named group from the reference, by name.

    Groups that share no seed with it are left out. The correction is over `comparisons`, by default
    those with two or more seeds.
    """
    family = {name: pair_by_seed([groups[reference], groups[name]]) for name in names}
    family = {name: pair for name, pair in family.items() if pair.values.size}
    m = comparisons or sum(pair.values.shape[1] > 1 for pair in family.values())
    return {name: _difference(name, reference, pair, m) for name, pair in family.items()}


def compare_interactions(pairs: Sequence[tuple[str, Sequence[Sequence[Run]]]]) -> list[Difference]:
    """Return how far the effect of both parts is from their sum: (d - a) - (b - a) - (c - a).

    Each quadruple of groups a, b, c, d (neither, first, second, both) is paired by seed, and left
    out if they share no seed. The correction is over quadruples that share two seeds or more.
    """
    family = [(name, pair_by_seed(groups)) for name, groups in pairs]
    family = [(name, pair) for name, pair in family if pair.values.size]
    m = sum(pair.values.shape[1] > 1 for _, pair in family)
    found = []
    for name, pair in family:
        plain, one, other, both = pair.values
        values = np.stack([one + other - plain, both])
        both_alone = "the sum of their separate gains"
        found.append(_difference(name, both_alone, replace(pair, values=values), m))
    return found


def _difference(name: str, baseline: str, pair: PairedValues, comparisons: int) -> Difference:
    """Return the statistics of the paired differences of values [2, n]."""
    d, first = pair.values[1] - pair.values[0], pair.first
    mean, varied = float(d.mean()), np.ptp(d[:first]) > RESOLUTION
    spread = deviation(d, first) if varied else 0.0
    return Difference(
        variant=name,
        baseline=baseline,
        n=len(d),
        mean=mean,
        deviation=spread,
        interval=t_interval(d, comparisons, first) if varied else None,
        p=paired_p(d, comparisons, first) if varied else None,
        comparisons=comparisons,
        seeds_needed=seeds_needed(mean, spread, comparisons) if varied else None,
        first=first,
        target_half_width=pair.target_half_width,
    )
