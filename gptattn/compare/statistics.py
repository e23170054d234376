"""The report's statistics: pure functions of arrays, over seeds.

One procedure decides: Student's t on differences that are paired by seed, Bonferroni's correction
over the comparisons of a family. The interval that is shown is the one that the correction leaves,
so that a difference is stated exactly where its interval leaves 0 out.

scipy is imported where it is used: it takes half a second, and a mistake on the command line must
not wait for it.
"""

import math
from bisect import bisect_left
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]

ALPHA = 0.05
POWER = 0.8
SEEDS_CAP = 1_000
CHI_PARTS = 200  # of equal probability: the power is exact to 0.001
# Differences closer together than this, in nats, are equal: a loss is a float32's mean.
RESOLUTION = 1e-6


def t_interval(values: ArrayLike, comparisons: int = 1) -> Interval | None:
    """Student's interval for the mean of `values` [n], 95% over all comparisons; none for n = 1."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    half = t_factor(len(x), comparisons) * x.std(ddof=1)
    return float(x.mean() - half), float(x.mean() + half)


@cache
def t_factor(n: int, comparisons: int = 1) -> float:
    """What the standard deviation of n values is multiplied by for half of a 95% interval."""
    return critical_t(n, comparisons) / math.sqrt(n)


@cache
def critical_t(n: int, comparisons: int = 1) -> float:
    """Student's t for n values that two-sided 5%, shared by the comparisons, lie beyond.

    Source: Dunn 1961, Journal of the American Statistical Association 56, 52-64.
    """
    from scipy.special import stdtrit

    return float(-stdtrit(n - 1, ALPHA / comparisons / 2))


def all_equal(differences: ArrayLike) -> bool:
    """Whether differences [n] have no spread to judge chance by: one of them, or all the same."""
    return bool(np.ptp(np.asarray(differences, dtype=np.float64)) <= RESOLUTION)


def paired_p(differences: ArrayLike, comparisons: int = 1) -> float:
    """Two-sided p of the mean of paired differences [n], times the comparisons, at most 1.

    Below 5% exactly where `t_interval` with as many comparisons leaves 0 out.
    """
    from scipy.special import stdtr

    d = np.asarray(differences, dtype=np.float64)
    t = d.mean() / d.std(ddof=1) * math.sqrt(len(d))
    return min(1.0, 2 * comparisons * float(stdtr(len(d) - 1, -abs(t))))


def power(effect: float, n: int, comparisons: int = 1) -> float:
    """The probability that n seeds show a true difference of `effect` standard deviations.

    Source: Cohen 1988, Statistical Power Analysis, sec. 2.3; the noncentral t as the mean over
    the chi distribution of the deviation, since scipy's own turns to NaN at few seeds.
    """
    from scipy.special import ndtr

    reach = critical_t(n, comparisons) * _deviations(n)
    shift = abs(effect) * math.sqrt(n)
    return float(np.mean(ndtr(shift - reach) + ndtr(-shift - reach)))


@cache
def _deviations(n: int) -> NDArray[np.float64]:
    """Quantiles of the deviation of n normal values, over the true one, [CHI_PARTS]."""
    from scipy.special import chdtri

    return np.sqrt(chdtri(n - 1, (np.arange(CHI_PARTS) + 0.5) / CHI_PARTS) / (n - 1))


def seeds_needed(difference: float, deviation: float, comparisons: int = 1) -> int | None:
    """The fewest seeds that show the difference with a probability of 80%, were it the true one.

    `deviation` is that of the paired differences, above 0. None: more than SEEDS_CAP.
    """
    effect = difference / deviation
    able = range(2, SEEDS_CAP + 1)
    i = bisect_left(able, POWER, key=lambda n: power(effect, n, comparisons))
    return able[i] if i < len(able) else None


def smallest_difference(deviation: float, n: int, comparisons: int = 1) -> float:
    """The true difference that n >= 2 seeds show with a probability of 80%.

    `deviation` is that of the paired differences.
    """
    from scipy.optimize import root_scalar

    highest = 3 * (critical_t(n, comparisons) + 3) / math.sqrt(n)
    found = root_scalar(lambda x: power(x, n, comparisons) - POWER, bracket=(0.0, highest))
    return deviation * found.root


def pareto_front(costs: ArrayLike, losses: ArrayLike) -> list[int]:
    """Indices of the points no other beats in both (equal in one, lower in the other), by cost."""
    cost, loss = np.asarray(costs, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    order = [int(i) for i in np.lexsort((loss, cost)) if np.isfinite(cost[i])]
    front: list[int] = []
    for i in order:
        same = front and cost[i] == cost[front[-1]] and loss[i] == loss[front[-1]]
        if not front or loss[i] < loss[front[-1]] or same:
            front.append(i)
    return front
