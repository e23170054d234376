"""The attention track's statistics: a loss in units of the baseline's compute, and verdicts.

The baseline is trained at several budgets with many seeds. A monotone curve through its mean losses
gives the compute it needs for any loss. An entry's effective compute is the compute the baseline
would need for the entry's loss, divided by what the entry used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gptattn.compare.statistics import ALPHA, Array, Interval
from gptattn.errors import DataError

# Seeds of an entry at each look, after the first and the second stage -> the share of the allowed
# errors. The first look gets little: early results look too good or too bad.
LOOKS = {3: 0.1, 8: 0.9}
MARGIN = 1.05  # times the compute: within this, entries are equivalent
NEGLIGIBLE = 1.01  # times the compute: within this, no difference is claimed, however certain
# Bits per byte: how much the choice of the learning rate costs an entry or the baseline, as a
# standard deviation (docs/track_rules.md, "How it is computed").
RATE_ERROR = 0.0025
GRID = 2_000  # points of the curve


@dataclass(frozen=True)
class Curve:
    """The baseline's loss by the logarithm of its compute, from smallest to largest budget."""

    logs: Array  # [GRID] of FLOPs, ascending
    losses: Array  # [GRID], falling
    errors: Array  # [GRID] standard errors


def fit_curve(
    losses: Mapping[float, Sequence[float]], deviations: Mapping[float, float] | None = None
) -> Curve:
    """Return the curve through the mean losses of the baseline's seeds, given by total FLOPs.

    It is a monotone piecewise cubic (Fritsch and Butland 1984, SIAM J. Sci. Stat. Comput. 5,
    300-304). Its standard errors follow, to first order, from those of the means, each trained at
    its own rate. `deviations`: the standard deviation over seeds at budgets where entries share it.
    Other budgets use their own, from 2 seeds or more. Raises DataError if a mean does not fall.
    """
    from scipy.interpolate import PchipInterpolator

    compute = sorted(losses)
    groups = [np.asarray(losses[spent], dtype=np.float64) for spent in compute]
    means = np.array([own.mean() for own in groups])
    if (np.diff(means) >= 0).any():
        why = "the baseline's loss does not fall as its budget grows"
        raise DataError("track", f"{why}; train more seeds")
    knots = np.log(compute)
    logs = np.linspace(knots[0], knots[-1], GRID)
    step = 1e-4 * np.ptp(means)
    variance = np.zeros(GRID)
    for i, (spent, own) in enumerate(zip(compute, groups, strict=True)):
        moved = np.eye(len(groups))[i] * step
        above, below = (PchipInterpolator(knots, means + one)(logs) for one in (moved, -moved))
        slopes = (above - below) / (2 * step)
        deviation = (deviations or {}).get(spent) or own.std(ddof=1)
        variance += slopes**2 * (deviation**2 / len(own) + RATE_ERROR**2)
    return Curve(logs, PchipInterpolator(knots, means)(logs), np.sqrt(variance))


class Spread(NamedTuple):
    """A standard deviation over seeds, and its degrees of freedom."""

    deviation: float
    degrees: int


def share_spread(groups: Sequence[Sequence[float]]) -> list[Spread]:
    """Return the standard deviation of each group of 2 values or more: a shared one, if possible.

    As long as the group that varies most is shown to vary more than the rest, it gets its own. The
    test is an F test, corrected for the number of groups. (Levene's test hardly ever notices a
    single run that diverged.)

    Source: Cochran 1941, Annals of Eugenics 11, 47-52.
    """
    from scipy.special import fdtr

    spreads = [Spread(float(np.std(own, ddof=1)), len(own) - 1) for own in groups]
    sharing = {*range(len(groups))}
    while len(sharing) > 1:
        widest = max(sharing, key=lambda i: spreads[i].deviation)
        own, rest = spreads[widest], _pool([spreads[i] for i in sharing - {widest}])
        ratio = (rest.deviation / own.deviation) ** 2 if own.deviation else 1.0
        if fdtr(rest.degrees, own.degrees, ratio) * len(sharing) >= ALPHA:
            break
        sharing.remove(widest)
    shared = _pool([spreads[i] for i in sharing])
    return [shared if i in sharing else own for i, own in enumerate(spreads)]


def _pool(spreads: Sequence[Spread]) -> Spread:
    degrees = sum(one.degrees for one in spreads)
    squares = sum(one.deviation**2 * one.degrees for one in spreads)
    return Spread(math.sqrt(squares / degrees), degrees)


@dataclass(frozen=True)
class EffectiveCompute:
    """An entry's effective compute, with its 95% interval.

    0 and infinity mean below and above the baseline's budgets. `p` is two-sided, for the hypothesis
    that the value lies between 1 / NEGLIGIBLE and NEGLIGIBLE. `equivalent`: whether two one-sided
    tests show that it lies between 1 / MARGIN and MARGIN.
    """

    value: float
    interval: Interval
    p: float
    equivalent: bool


def effective_compute(
    losses: Sequence[float], compute: float, curve: Curve, spread: Spread, share: float = 1.0
) -> EffectiveCompute:
    """Return the effective compute from losses over seeds of runs that used `compute` FLOPs each.

    The interval holds each compute at which the curve's loss is not shown to differ from the mean
    loss, as in Fieller 1954, Journal of the Royal Statistical Society B 16, 175-185. RATE_ERROR
    counts twice, because entry and baseline were each trained at a chosen rate. `share`: the
    fraction of errors that the test of equivalence is allowed, from LOOKS.
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
        at = math.log(ratio)
        found = float(np.interp(at, ratios, t))
        # Beyond the baseline's budgets, t is only known to lie beyond its value at the nearest.
        return max(found, 0.0) if at > ratios[-1] else min(found, 0.0) if at < ratios[0] else found

    return EffectiveCompute(
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
) -> tuple[list[EffectiveCompute], list[float], list[str]]:
    """Return each entry's effective compute, its p corrected over all entries, and its verdict."""
    shares = [LOOKS[len(own)] for own in losses]
    found = [
        effective_compute(own, spent, curve, spread, share)
        for own, spent, spread, share in zip(losses, flops, spreads, shares, strict=True)
    ]
    corrected = correct_holm([one.p for one in found], shares)
    return found, corrected, [decide(p, one) for p, one in zip(corrected, found, strict=True)]


def difference_interval(
    losses: Sequence[float], baseline: Sequence[float], spread: Spread, of_baseline: Spread
) -> tuple[float, Interval]:
    """Return the mean loss minus the baseline's, and its 95% interval, from both spreads."""
    from scipy.special import stdtrit

    mean = float(np.mean(losses) - np.mean(baseline))
    seeds = spread.deviation**2 / len(losses) + of_baseline.deviation**2 / len(baseline)
    error = math.sqrt(seeds + 2 * RATE_ERROR**2)
    half = float(-stdtrit(spread.degrees, ALPHA / 2)) * error
    return mean, (mean - half, mean + half)


def correct_holm(p_values: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the p values corrected for their number and for their looks' `shares` of errors.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    divided = np.divide(p_values, shares)
    order = np.argsort(divided)
    corrected = np.empty(len(divided))
    steps = divided[order] * np.arange(len(divided), 0, -1)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, steps))
    return corrected.tolist()


def decide(p: float, found: EffectiveCompute) -> str:
    """Return better, worse, equivalent or open, from a corrected p.

    A significant difference can still be small.
    """
    if p < ALPHA:
        words = "better" if found.value > 1 else "worse"
        return f"{words}, by less than {MARGIN - 1:.0%}" if found.equivalent else words
    return "equivalent" if found.equivalent else "open"
