"""The report's statistics, checked by hand, with other libraries, and on simulated runs."""

import math

import numpy as np
import pytest
from scipy.stats import binom, t, ttest_rel

from gptattn.compare.statistics import (
    critical_t,
    paired_p,
    pareto_front,
    power,
    seeds_needed,
    stein_seeds,
    t_interval,
)

SIMULATIONS = 4_000


def binomial_bounds(rate: float) -> tuple[float, float]:
    """Return the 0.1% and 99.9% quantiles of the count of events with this rate in SIMULATIONS."""
    return tuple(binom.ppf([0.001, 0.999], SIMULATIONS, rate))


def test_the_interval_of_a_mean_is_students():
    # By hand: mean 2.5, deviation 0.5, t(0.975, 2) = 4.302653 from the table.
    half = 4.302653 * 0.5 / math.sqrt(3)
    assert t_interval([2.0, 2.5, 3.0]) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-6)
    assert t_interval([2.0]) is None
    # Two-sided 5% shared by three comparisons, 4 degrees of freedom: 3.961 (Bailey 1977, Table 1).
    assert critical_t(5, 3) == pytest.approx(3.961, abs=5e-4)
    low, high = t_interval([0.1, 0.2, 0.3, 0.4, 0.5], 3) or (0, 0)
    assert (high - low) / 2 == pytest.approx(3.961 * math.sqrt(0.025) / math.sqrt(5), rel=1e-4)


def test_p_by_hand_and_by_scipy():
    # Mean 2, deviation 1: t = 2 * root of 3. With 2 degrees of freedom p = 1 - t / sqrt(t^2 + 2).
    p = 1 - math.sqrt(12 / 14)
    assert paired_p([1.0, 2.0, 3.0]) == pytest.approx(p)
    assert paired_p([-1.0, -2.0, -3.0], 5) == pytest.approx(5 * p)
    assert paired_p([1.0, 2.0, 3.0], 20) == 1.0
    x, y = np.random.default_rng(1).normal(loc=[[0.9], [0.0]], size=(2, 7))
    assert paired_p(x - y, 2) == pytest.approx(2 * ttest_rel(x, y).pvalue)


def test_p_is_below_five_percent_exactly_when_the_interval_excludes_0():
    generator = np.random.default_rng(2)
    decided = {True: 0, False: 0}
    for _ in range(SIMULATIONS):
        n, m = generator.integers(2, 13), int(generator.integers(1, 9))
        d = generator.normal(loc=generator.uniform(0, 3), size=n)
        low, high = t_interval(d, m) or (0, 0)
        shown = paired_p(d, m) < 0.05
        assert shown == (low > 0 or high < 0)
        decided[shown] += 1
    assert min(decided.values()) > SIMULATIONS / 5


# Each makes losses of a variant and the baseline, both [SIMULATIONS, n], with equal means.
SHAPES = {
    "normal": lambda g, size: g.normal(size=(2, *size)),
    "of one seed alike": lambda g, size: g.normal(size=(2, *size)) + 2 * g.normal(size=size),
    "skewed": lambda g, size: g.exponential(size=(2, *size)),
    "heavy-tailed": lambda g, size: g.standard_t(3, size=(2, *size)),
    "of unlike spread": lambda g, size: np.array([[[3]], [[1]]]) * g.normal(size=(2, *size)),
}


@pytest.mark.parametrize("n", [3, 5, 12])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_interval_misses_the_true_difference_in_at_most_five_percent(shape, n):
    variant, baseline = SHAPES[shape](np.random.default_rng(n), (SIMULATIONS, n))
    missed = 0
    for d in variant - baseline:
        low, high = t_interval(d) or (0, 0)
        missed += not low <= 0 <= high
    assert missed <= binomial_bounds(0.05)[1]
    if shape in ("normal", "of one seed alike"):
        assert missed >= binomial_bounds(0.05)[0]


def test_seeds_needed_match_published_tables():
    # Cohen 1988 and G*Power for a paired t test, two-sided 5%, power 0.8.
    published = {1.0: 10, -0.5: 34, 0.2: 199, 0.001: None, 0.0: None, 1e6: 2}
    assert {effect: seeds_needed(effect, 1.0) for effect in published} == published
    # 5% shared by five comparisons is 1%; the 1% table has 51 for an effect of 0.5.
    assert seeds_needed(0.5, 1.0, 5) == 51


@pytest.mark.parametrize(
    ("effect", "n", "comparisons"), [(10.0, 2, 1), (4.0, 3, 3), (2.0, 5, 3), (1.5, 8, 7)]
)
def test_the_power_is_the_share_of_samples_that_show_the_difference(effect, n, comparisons):
    d = np.random.default_rng(n).normal(loc=effect, size=(SIMULATIONS, n))
    # An independent oracle: t from numpy, its quantile from scipy.
    values = d.mean(axis=1) / d.std(axis=1, ddof=1) * math.sqrt(n)
    shown = (np.abs(values) > t.isf(0.025 / comparisons, n - 1)).sum()
    low, high = binomial_bounds(power(effect, n, comparisons))
    assert low <= shown <= high


def test_the_front_has_the_points_that_no_other_beats():
    costs = [1.0, 2.0, 2.0, 3.0, 4.0, 1.0]
    losses = [5.0, 4.0, 4.5, 4.0, 1.0, 5.0]
    # Point 2 loses to 1 at the same cost; 3 costs more than 1 for the same loss; 0 and 5 are equal.
    assert sorted(pareto_front(costs, losses)) == [0, 1, 4, 5]
    assert pareto_front([], []) == []


def test_steins_two_stages_by_hand():
    # (3.961 * 0.03 / 0.02) squared is 35.3, with t of 4 degrees at 5% shared by three comparisons.
    assert stein_seeds(0.03, 0.02, first=5, comparisons=3) == 36
    assert stein_seeds(0.001, 0.02, first=5, comparisons=3) == 5  # what was run is not taken back
    assert stein_seeds(0.03, 0.005, first=5, comparisons=3) == 565
    # First stage: deviation 1, t(0.975, 2) = 4.302653. Over all nine values the mean is 4.
    values = [1.0, 2.0, 3.0, 100.0, -64.0, 5.0, -4.0, -8.0, 1.0]
    half = 4.302653 / 3
    assert t_interval(values, first=3) == pytest.approx((4 - half, 4 + half), abs=1e-6)
    assert t_interval(values[:3], first=3) == pytest.approx(t_interval(values[:3]))
    assert t_interval([1.0], first=5) is None
    # The p of this interval's 4 / (4.302653 / 3) times the critical t, by hand: t = 12, 2 degrees.
    assert paired_p(values, first=3) == pytest.approx(0.0068729, abs=1e-6)


# Losses of deviation 1; heavy tails are those of t with 5 degrees of freedom.
TAILS = {
    "normal": lambda g, size: g.standard_normal(size),
    "heavy": lambda g, size: math.sqrt(3 / 5) * g.standard_t(5, size),
}


@pytest.mark.parametrize("tails", TAILS)
@pytest.mark.parametrize("first", [5, 8])
def test_two_stages_keep_their_promise_on_simulated_sweeps(tails, first):
    # Three variants and their baseline share seeds, and each variant stops at its own number.
    deviation, half_width, variants, sweeps = 0.02, 0.02, 3, SIMULATIONS // 2
    generator = np.random.default_rng(0)
    missed = 0
    for _ in range(sweeps):
        losses = deviation * TAILS[tails](generator, (variants + 1, first))
        spread = (losses[1:] - losses[0]).std(axis=1, ddof=1)
        counts = [stein_seeds(float(s), half_width, first, variants) for s in spread]
        more = deviation * TAILS[tails](generator, (variants + 1, max(counts) - first))
        losses = np.concatenate([losses, more], axis=1)
        found = [
            t_interval(row[:n] - losses[0, :n], variants, first)
            for row, n in zip(losses[1:], counts, strict=True)
        ]
        assert all(high - low <= 2 * half_width + 1e-12 for low, high in filter(None, found))
        missed += any(low > 0 or high < 0 for low, high in filter(None, found))
    # All means are equal, so what misses 0 is a false claim too.
    assert missed <= binom.ppf(0.999, sweeps, 0.05)
