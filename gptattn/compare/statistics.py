"""The report's statistics over seeds: first functions of arrays, then of runs, paired by seed.

In a report, one procedure decides: Student's t on differences paired by seed, with Bonferroni's
correction over the comparisons of a family. The interval shown is the corrected one, so a
difference is stated exactly when its interval excludes 0. If the spread over the first seeds
decided how many there are, `first` is their number, and the deviation and its degrees of freedom
come from them alone, so that the confidence is as stated whatever the deviation. Source: Stein
1945, Annals of Mathematical Statistics 16, 243-258.

The attention track, at the end of the file, states a loss in units of the baseline's compute. The
baseline is trained at several budgets with many seeds, and a monotone curve through its mean losses
says how much compute it needs for a loss. An entry's effective compute is what the baseline would
need for the entry's loss, over what the entry used.

scipy is imported inside the functions: the import takes half a second, and a mistake on the command
line should be reported before that.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gptattn.compare.finished_runs import Run
from gptattn.errors import DataError
from gptattn.runs.metrics import LOSS
from gptattn.runs.two_stages import FirstStage

Interval = tuple[float, float]
Array = NDArray[np.float64]

ALPHA = 0.05
POWER = 0.8
SEEDS_CAP = 1_000
CHI_PARTS = 200  # quantiles of equal probability; they make the power accurate to 0.001
# Differences within this range, in nats, count as equal: losses have float32 precision.
RESOLUTION = 1e-6


def t_interval(
    values: ArrayLike, comparisons: int = 1, first: int | None = None
) -> Interval | None:
    """Return Student's interval for the mean of `values` [n]; None for n < 2.

    The confidence is 95% over all comparisons together. With `first`, it is Stein's: the first
    stage's values come first.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    half = critical_t(first or len(x), comparisons) * deviation(x, first) / math.sqrt(len(x))
    return float(x.mean() - half), float(x.mean() + half)


def deviation(values: ArrayLike, first: int | None = None) -> float:
    """Return the standard deviation of `values` [n], or of the first stage's."""
    return float(np.asarray(values, dtype=np.float64)[:first].std(ddof=1))


@cache
def critical_t(n: int, comparisons: int = 1) -> float:
    """Return the two-sided critical t for n values at level 5% / comparisons (Bonferroni).

    Source: Dunn 1961, Journal of the American Statistical Association 56, 52-64.
    """
    from scipy.special import stdtrit

    return float(-stdtrit(n - 1, ALPHA / comparisons / 2))


def all_equal(differences: ArrayLike) -> bool:
    """Whether differences [n] have no spread, which rules out a test; true for n = 1."""
    return bool(np.ptp(np.asarray(differences, dtype=np.float64)) <= RESOLUTION)


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
    """Return the fewest seeds that show `difference` with 80% power, if it is the true one.

    `deviation` is the standard deviation of the paired differences, above 0. Return None for more
    than SEEDS_CAP.
    """
    effect = difference / deviation
    able = range(2, SEEDS_CAP + 1)
    i = bisect_left(able, POWER, key=lambda n: power(effect, n, comparisons))
    return able[i] if i < len(able) else None


def smallest_difference(deviation: float, n: int, comparisons: int = 1) -> float:
    """Return the true difference that n >= 2 seeds show with 80% power.

    `deviation` is the standard deviation of the paired differences.
    """
    from scipy.optimize import root_scalar

    highest = 3 * (critical_t(n, comparisons) + 3) / math.sqrt(n)
    found = root_scalar(lambda x: power(x, n, comparisons) - POWER, bracket=(0.0, highest))
    return deviation * found.root


def stein_seeds(deviation: float, half_width: float, first: int, comparisons: int = 1) -> int:
    """Return how many seeds an interval of the mean +- `half_width` needs, by Stein's two stages.

    `deviation` is that of the paired differences over the `first` >= 2 seeds of the first stage,
    which count: the answer is never below `first`. The interval is `t_interval`'s with `first`.
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
    """A mean over n seeds with Student's 95% interval; None for n = 1."""

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
    first: int | None = None  # of the n, the first stage of `sweep.until`; None: no second stage
    asked: float | None = None  # half of the interval that `sweep.until` asks for, nats

    @property
    def shown(self) -> bool:
        """Whether the runs show a difference: the interval excludes 0."""
        return self.p is not None and self.p < ALPHA


@dataclass(frozen=True)
class Change:
    """Means over the common seeds of two figures, and their difference, after minus before."""

    before: float
    after: float
    difference: Difference


@dataclass(frozen=True)
class Paired:
    """Values at the seeds that several groups have in common.

    `first`: how many of these, at the start, belong to the first stage of `sweep.until`; None: no
    spread over seeds decided how many there are. `asked`: half of the interval that it asks for.
    """

    values: Array  # [groups, n]
    first: int | None = None
    asked: float | None = None


def pair_by_seed(groups: Sequence[Sequence[Run]], metric: str = LOSS) -> Paired:
    """Return the metric of each group at the seeds common to all, [groups, n]."""
    found = [
        {run.seed: run.metrics[metric] for run in runs if metric in run.metrics} for runs in groups
    ]
    stage = _stage(groups)
    first = {*stage.first} if stage else set[int]()
    common = set.intersection(*(set(values) for values in found))
    seeds = sorted(common, key=lambda seed: (seed not in first, seed))
    values = np.array([[values[seed] for seed in seeds] for values in found])
    count = len(common & first)
    # A single seed of the first stage gives no deviation.
    asked = stage.half_width if stage else None
    return Paired(values, count if 1 < count < len(common) else None, asked)


def _stage(groups: Sequence[Sequence[Run]]) -> FirstStage | None:
    """Return the first stage of `sweep.until`, if all of these runs began with the same seeds.

    If several widths were asked for, the smallest counts.
    """
    stages = {run.stage for runs in groups for run in runs}
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages) or len({stage.first for stage in known}) != 1:
        return None
    return min(known, key=lambda stage: stage.half_width)


def compare_family(
    pairs: Mapping[tuple[str, str], Sequence[Sequence[Run]]],
    metric: str = LOSS,
    comparisons: int | None = None,
) -> dict[str, Change]:
    """Return the change from the first to the second group of each (baseline, variant) pair.

    The result is keyed by variant. With four groups a, b, c, d it is the change from a - b to
    c - d. Pairs without a common seed are left out. The correction is over `comparisons`; by
    default, the pairs with two or more seeds.
    """
    family: dict[tuple[str, str], Paired] = {}
    for names, groups in pairs.items():
        pair = pair_by_seed(groups, metric)
        values = pair.values
        if values.size:
            two = values if len(values) == 2 else values[0::2] - values[1::2]
            family[names] = replace(pair, values=two)
    m = comparisons or sum(pair.values.shape[1] > 1 for pair in family.values())
    changes = {}
    for (baseline, variant), pair in family.items():
        before, after = pair.values.mean(axis=1)
        difference = _difference(variant, baseline, pair, m)
        changes[variant] = Change(float(before), float(after), difference)
    return changes


def _difference(name: str, baseline: str, pair: Paired, comparisons: int) -> Difference:
    """Return the statistics of the paired differences of values [2, n]."""
    d, first = pair.values[1] - pair.values[0], pair.first
    mean, varied = float(d.mean()), not all_equal(d[:first])
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
        asked=pair.asked,
    )


# The attention track

# Seeds of an entry, at first and with those of the second stage -> this look's share of the errors
# that are allowed. The first has little: what is decided early looks too good, or too bad.
LOOKS = {3: 0.1, 8: 0.9}
MARGIN = 1.05  # times the compute: what counts as equivalent
NEGLIGIBLE = 1.01  # times the compute: what is not claimed, however certain
# Bits per byte: the standard deviation of what the choice of the rate costs an entry, or the
# baseline (docs/track.md, "How it is computed").
RATE_ERROR = 0.0025
MIN_BUDGETS = 3
TRAIN_BASELINE = (
    "train it with experiment=track_baseline, or at the gate with "
    "experiment=track_gate attn=mha budget.steps=800,1600,3200"
)
GRID = 2_000  # points of the curve


@dataclass(frozen=True)
class Curve:
    """The baseline's loss by the logarithm of its compute, between its least and most budget."""

    logs: Array  # [GRID] of FLOPs, ascending
    losses: Array  # [GRID], falling
    errors: Array  # [GRID] standard errors


def fit_curve(losses: Mapping[float, Sequence[float]]) -> Curve:
    """Return the curve through the mean losses of the baseline's seeds, given by total FLOPs.

    It is monotone: a piecewise cubic (Fritsch and Butland 1984, SIAM J. Sci. Stat. Comput. 5,
    300-304). Its standard errors follow, to first order, from those of the means, each trained at
    its own rate. Raises DataError for fewer than three budgets, for one with a single seed, and if
    a mean does not fall.
    """
    from scipy.interpolate import PchipInterpolator

    compute = sorted(losses)
    groups = [np.asarray(losses[spent], dtype=np.float64) for spent in compute]
    means = np.array([own.mean() for own in groups])
    if len(groups) < MIN_BUDGETS or min(map(len, groups)) < 2:
        raise DataError(
            "track",
            f"the baseline needs {MIN_BUDGETS} budgets or more, of 2 seeds each; {TRAIN_BASELINE}",
        )
    if (np.diff(means) >= 0).any():
        raise DataError("track", "the baseline's loss does not fall with its budget")
    knots = np.log(compute)
    logs = np.linspace(knots[0], knots[-1], GRID)
    step = 1e-4 * np.ptp(means)
    variance = np.zeros(GRID)
    for i, own in enumerate(groups):
        moved = np.eye(len(groups))[i] * step
        above, below = (PchipInterpolator(knots, means + one)(logs) for one in (moved, -moved))
        slopes = (above - below) / (2 * step)
        variance += slopes**2 * (own.var(ddof=1) / len(own) + RATE_ERROR**2)
    return Curve(logs, PchipInterpolator(knots, means)(logs), np.sqrt(variance))


class Spread(NamedTuple):
    """A standard deviation over seeds, and its degrees of freedom."""

    deviation: float
    degrees: int


def share_spread(groups: Sequence[Sequence[float]]) -> list[Spread]:
    """Return each group's standard deviation: one that is shared, as far as Levene's test allows.

    While the test rejects a shared one, the group that varies most gets its own. Groups of one
    value share. Raises DataError if no group has two values.

    Source: Brown and Forsythe 1974, Journal of the American Statistical Association 69, 364-367.
    """
    from scipy.stats import levene

    arrays = [np.asarray(own, dtype=np.float64) for own in groups]
    sharing = [i for i, own in enumerate(arrays) if len(own) > 1]
    if not sharing:
        raise DataError("track", "no entry has two seeds, so there is no spread to test against")
    while len(sharing) > 1 and any(np.ptp(arrays[i]) > 0 for i in sharing):
        if levene(*(arrays[i] for i in sharing)).pvalue >= ALPHA:
            break
        sharing.remove(max(sharing, key=lambda i: arrays[i].var(ddof=1)))
    degrees = sum(len(arrays[i]) - 1 for i in sharing)
    squares = sum(float(arrays[i].var(ddof=1)) * (len(arrays[i]) - 1) for i in sharing)
    shared = Spread(math.sqrt(squares / degrees), degrees)
    return [
        shared if i in sharing or len(own) < 2 else Spread(float(own.std(ddof=1)), len(own) - 1)
        for i, own in enumerate(arrays)
    ]


@dataclass(frozen=True)
class Effective:
    """What the baseline would need for an entry's loss, over what the entry used, with its 95%
    interval.

    0 and infinity stand for less and more than the baseline's budgets. `p` is two-sided, for
    the hypothesis that it lies between 1 / NEGLIGIBLE and NEGLIGIBLE; `equivalent`: whether it is
    shown to lie between 1 / MARGIN and MARGIN, by two one-sided tests at 5%.
    """

    value: float
    interval: Interval
    p: float
    equivalent: bool


def effective_compute(
    losses: Sequence[float], compute: float, curve: Curve, spread: Spread, share: float = 1.0
) -> Effective:
    """Return the effective compute of losses over seeds, of runs that used so many FLOPs each.

    The interval holds each compute at which the curve's loss is not shown to differ from the mean
    loss, as in Fieller 1954, Journal of the Royal Statistical Society B 16, 175-185. Both were
    trained at a rate that was chosen: RATE_ERROR counts for each. `share`: that of LOOKS, in which
    equivalence may err.
    """
    from scipy.special import stdtr, stdtrit

    mean = float(np.mean(losses))
    error = np.sqrt(spread.deviation**2 / len(losses) + curve.errors**2 + RATE_ERROR**2)
    t = np.maximum.accumulate((mean - curve.losses) / error)  # rises with the baseline's compute
    ratios = curve.logs - math.log(compute)
    two, one = (float(-stdtrit(spread.degrees, level)) for level in (ALPHA / 2, share * ALPHA))

    def reached(level: float) -> float:
        """The ratio at which t is `level`."""
        if t[0] > level:
            return 0.0
        return math.inf if t[-1] < level else math.exp(np.interp(level, t, ratios))

    def t_at(ratio: float) -> float:
        at = math.log(ratio)  # 0, which shows nothing, beyond the baseline's budgets
        return float(np.interp(at, ratios, t)) if ratios[0] <= at <= ratios[-1] else 0.0

    return Effective(
        reached(0.0),
        (reached(-two), reached(two)),
        min(1.0, 2 * float(stdtr(spread.degrees, min(t_at(NEGLIGIBLE), -t_at(1 / NEGLIGIBLE))))),
        t_at(1 / MARGIN) <= -one and t_at(MARGIN) >= one,
    )


def judge(
    losses: Sequence[Sequence[float]],
    flops: Sequence[float],
    curve: Curve,
    spreads: Sequence[Spread],
) -> tuple[list[Effective], list[float], list[str]]:
    """Return each entry's effective compute, its p corrected over all entries, and its verdict."""
    shares = [LOOKS[len(own)] for own in losses]
    found = [
        effective_compute(own, spent, curve, spread, share)
        for own, spent, spread, share in zip(losses, flops, spreads, shares, strict=True)
    ]
    corrected = correct_holm([one.p for one in found], shares)
    return found, corrected, [decide(p, one) for p, one in zip(corrected, found, strict=True)]


def difference_interval(
    losses: Sequence[float], baseline: Sequence[float], spread: Spread
) -> tuple[float, Interval]:
    """Return the mean loss minus the baseline's, with its 95% interval."""
    from scipy.special import stdtrit

    mean = float(np.mean(losses) - np.mean(baseline))
    seeds = spread.deviation**2 * (1 / len(losses) + 1 / len(baseline))
    error = math.sqrt(seeds + 2 * RATE_ERROR**2)
    half = float(-stdtrit(spread.degrees, ALPHA / 2)) * error
    return mean, (mean - half, mean + half)


def correct_holm(p_values: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the p values corrected for their number, and for the looks, whose shares are given.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    divided = np.divide(p_values, shares)
    order = np.argsort(divided)
    corrected = np.empty(len(divided))
    steps = divided[order] * np.arange(len(divided), 0, -1)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, steps))
    return corrected.tolist()


def decide(p: float, found: Effective) -> str:
    """Return better, worse, equivalent or open, from a corrected p.

    A difference that is shown may still be small.
    """
    if p < ALPHA:
        words = "better" if found.value > 1 else "worse"
        return f"{words}, by less than {MARGIN - 1:.0%}" if found.equivalent else words
    return "equivalent" if found.equivalent else "open"
