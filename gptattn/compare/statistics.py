"""The report's statistics: pure functions of arrays, over seeds.

scipy is imported where it is used: it takes half a second, and a mistake on the command line must
not wait for it.
"""

import math
import warnings
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]

LEVEL = 0.95
ALPHA = 0.05
POWER = 0.8
RESAMPLES = 9_999
EXACT = 10_000  # permutations; of more, RESAMPLES are drawn
# Below, the paired t interval: of four values too many resamples are nearly equal, and the
# bootstrap's interval, though it covers, is 1.7 times as wide.
BOOTSTRAP_SEEDS = 5
SEEDS_CAP = 1_000
RANDOM_SEED = 0  # of resampling: the same runs give the same report


def t_interval(values: ArrayLike) -> Interval | None:
    """Student's 95% interval for the mean of `values` [n]; none for n = 1."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    half = t_factor(len(x)) * x.std(ddof=1)
    return float(x.mean() - half), float(x.mean() + half)


@cache
def t_factor(n: int) -> float:
    """What the standard deviation of n values is multiplied by for half of a 95% interval."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + LEVEL) / 2) / math.sqrt(n))


def difference_interval(differences: ArrayLike) -> tuple[Interval | None, str]:
    """A 95% interval for the mean of paired differences [n], and the name of its method."""
    d = np.asarray(differences, dtype=np.float64)
    if len(d) < 2:
        return None, "none"
    if np.ptp(d) == 0:
        return (float(d[0]), float(d[0])), "all differences equal"
    if len(d) < BOOTSTRAP_SEEDS:
        return t_interval(d), "paired t"
    return bootstrap_t_interval(d), "bootstrap-t"


def bootstrap_t_interval(differences: ArrayLike, resamples: int = RESAMPLES) -> Interval:
    """The bootstrap-t 95% interval for the mean of [n] values, not all of them equal.

    Each resample gives t* = (mean* - mean) / se*; the interval is mean - q se for the 97.5% and
    the 2.5% quantile q of t*. Resamples of one value, repeated, have no se* and are dropped.
    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, sec. 12.5.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap

    d = np.asarray(differences, dtype=np.float64)
    mean, se = d.mean(), d.std(ddof=1) / math.sqrt(len(d))

    def studentised(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        spread = x.std(axis=axis, ddof=1) / math.sqrt(len(d))
        # Equal values leave a rounding error where the deviation should be 0.
        spread[np.ptp(x, axis=axis) == 0] = np.nan
        return (x.mean(axis=axis) - mean) / spread

    with warnings.catch_warnings():
        # scipy warns of the dropped resamples: its own interval, which is not used, is NaN then.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        done = bootstrap(
            (d,),
            studentised,
            n_resamples=resamples,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(RANDOM_SEED),
        )
    t = done.bootstrap_distribution
    low, high = np.quantile(t[np.isfinite(t)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(mean - high * se), float(mean - low * se)


def test_name(n: int, comparisons: int) -> str:
    """Which permutation test n seeds get: a rule on numbers known before any loss is.

    `sign-flip` where its smallest p can pass Holm's correction, otherwise `label`, which has more
    permutations.
    """
    return "sign-flip" if 2 / 2**n * comparisons < ALPHA else "label"


test_name.__test__ = False  # type: ignore[attr-defined]  # not for pytest to collect


def smallest_p(n: int, comparisons: int) -> float:
    """The smallest two-sided p that n seeds can give, before correction."""
    count = 2**n if test_name(n, comparisons) == "sign-flip" else math.comb(2 * n, n)
    return min(1.0, 2 / count if count <= EXACT else 2 / (RESAMPLES + 1))


def fewest_seeds(comparisons: int) -> int | None:
    """The fewest seeds at which any difference can pass; None where no number of them does."""
    able = (n for n in range(2, 65) if smallest_p(n, comparisons) * comparisons < ALPHA)
    return next(able, None)


def permutation_p(variant: ArrayLike, baseline: ArrayLike, comparisons: int) -> float:
    """Two-sided p of the mean difference of losses [n] paired by seed, before correction.

    sign-flip: each difference is as likely to have the other sign. label: each of the 2n losses is
    as likely to be of either variant; valid, and conservative where pairs correlate positively, as
    they do with the same data order. Exact up to EXACT permutations.
    Source: Good 2005, Permutation, Parametric and Bootstrap Tests of Hypotheses, sec. 3.2, 3.3.
    """
    from scipy.stats import permutation_test

    x, y = np.asarray(variant, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    flip = test_name(len(x), comparisons) == "sign-flip"
    count = 2 ** len(x) if flip else math.comb(2 * len(x), len(x))
    done = permutation_test(
        (x - y,) if flip else (x, y),
        _mean if flip else _mean_difference,
        permutation_type="samples" if flip else "independent",
        n_resamples=EXACT if count <= EXACT else RESAMPLES,
        vectorized=True,
        rng=np.random.default_rng(RANDOM_SEED),
    )
    return float(done.pvalue)


def order_p(losses: ArrayLike) -> float:
    """One-sided p for losses [n seeds, k >= 3] that rise from the first column to the last.

    The order must be given before the losses are seen. Exact: within a seed each order of the
    columns is as likely as any other where they are alike.
    Source: Page 1963, Journal of the American Statistical Association 58, 216-230.
    """
    from scipy.stats import page_trend_test

    return float(page_trend_test(np.asarray(losses, dtype=np.float64), method="exact").pvalue)


def _mean(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    return x.mean(axis=axis)


def _mean_difference(
    x: NDArray[np.float64], y: NDArray[np.float64], axis: int
) -> NDArray[np.float64]:
    return x.mean(axis=axis) - y.mean(axis=axis)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: monotone, at most 1, in the given order.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def seeds_needed(difference: float, deviation: float, comparisons: int = 1) -> int | None:
    """The fewest seeds at which a paired two-sided t test has 80% power.

    The test is at 5% over the number of comparisons, Holm's strictest step. `deviation` is that
    of the paired differences. None: more than SEEDS_CAP.
    Source: Cohen 1988, Statistical Power Analysis, sec. 2.3; by the noncentral t itself.
    """
    from scipy.stats import nct, t

    if difference == 0:
        return None
    if deviation == 0:
        return 2
    n = np.arange(2, SEEDS_CAP + 1)
    shift = abs(difference) / deviation * np.sqrt(n)
    critical = t.isf(ALPHA / comparisons / 2, n - 1)
    # Far out, the noncentral t of scipy turns to NaN where the power is 1.
    power = np.where(shift > 30, 1.0, 0.0)
    near = shift <= 30
    power[near] = nct.sf(critical[near], n[near] - 1, shift[near])
    power[near] += nct.cdf(-critical[near], n[near] - 1, shift[near])
    enough = power >= POWER
    return int(n[enough.argmax()]) if enough.any() else None


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
