"""The report's statistics: by hand, and on simulated runs."""

import math

import numpy as np
import pytest

from gptattn.compare import statistics
from gptattn.compare.statistics import (
    bootstrap_t_interval,
    difference_interval,
    fewest_seeds,
    holm,
    pareto_front,
    permutation_p,
    seeds_needed,
    smallest_p,
    t_interval,
)

SIMULATIONS = 1_000


def binomial_bounds(rate: float) -> tuple[float, float]:
    """Counts out of SIMULATIONS that the rate leaves with a probability of 0.1% on each side."""
    from scipy.stats import binom

    return tuple(binom.ppf([0.001, 0.999], SIMULATIONS, rate))


def test_the_interval_of_a_mean_is_students() -> None:
    # By hand: mean 2.5, deviation 0.5, t(0.975, 2) = 4.302653 from the table, root of 3.
    half = 4.302653 * 0.5 / math.sqrt(3)
    assert t_interval([2.0, 2.5, 3.0]) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-6)
    assert t_interval([2.0]) is None


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, made monotone.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_all_losses_of_one_variant_lower_give_the_smallest_p_of_the_labels() -> None:
    # Of the C(6, 3) = 20 ways to label six runs one is as extreme on each side: 2 / 20.
    assert permutation_p([1, 2, 3], [4, 5, 6], 1) == pytest.approx(0.1)
    assert smallest_p(3, 1) == pytest.approx(0.1)


def test_label_permutations_counted_by_hand() -> None:
    # Sums of two out of {1, 2, 4, 8}: 3, 5, 6, 9, 10, 12. Ours is 5: two of six are as low.
    assert permutation_p([1, 4], [2, 8], 1) == pytest.approx(2 * 2 / 6)


def test_equal_signs_of_all_differences_give_the_smallest_p_of_the_flips() -> None:
    # Six differences of one sign: one of 2^6 on each side.
    x = np.array([1.1, 1.3, 1.2, 1.7, 1.6, 1.9])
    assert permutation_p(x + np.arange(1, 7), x, 1) == pytest.approx(2 / 64)
    assert smallest_p(6, 1) == 2 / 64


def test_sign_flips_counted_by_hand() -> None:
    # |d| = 1, 2, 3, 4, 5, 6 with minus at the 1 and the 2: the sum is 15 of 21. A sum of 15 or
    # more leaves a sum of 3 or less to the minuses: {}, 1, 2, 3, 1+2 - five of 64.
    d = np.array([-1.0, -2.0, 3.0, 4.0, 5.0, 6.0])
    assert permutation_p(d, np.zeros(6), 1) == pytest.approx(2 * 5 / 64)


def test_equal_runs_give_no_evidence() -> None:
    assert permutation_p([1, 2, 3, 4], [1, 2, 3, 4], 1) == 1.0
    assert permutation_p([1] * 8, [1] * 8, 1) == 1.0


def test_which_test_is_fixed_by_the_numbers_of_seeds_and_comparisons() -> None:
    # 2/2^6 = 0.031 passes alone; two comparisons need 2/2^7.
    assert statistics.test_name(6, 1) == "sign-flip"
    assert statistics.test_name(6, 2) == "label"
    assert statistics.test_name(7, 2) == "sign-flip"
    # 2/C(8, 4) = 0.0286: four seeds do for one comparison, five for two to six.
    assert [fewest_seeds(m) for m in (1, 2, 6, 7)] == [4, 5, 5, 6]
    # With 9,999 drawn permutations p is 2/10,000 at least: no number of seeds is enough for 250.
    assert fewest_seeds(250) is None


def test_drawn_permutations_agree_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=12) + 0.4, generator.normal(size=12)
    exact = permutation_p(x, y, 1)
    monkeypatch.setattr(statistics, "EXACT", 10)
    # Three standard errors of a share of 9,999.
    assert permutation_p(x, y, 1) == pytest.approx(exact, abs=2 * 3 * math.sqrt(exact / 2 / 9_999))


def test_seeds_needed_are_those_of_the_tables() -> None:
    # Cohen 1988 and G*Power for a paired t test, two-sided 5%, power 0.8.
    assert seeds_needed(1.0, 1.0) == 10
    assert seeds_needed(-0.5, 1.0) == 34
    assert seeds_needed(0.2, 1.0) == 199
    assert seeds_needed(0.001, 1.0) is None
    assert seeds_needed(0.0, 1.0) is None
    assert seeds_needed(0.1, 0.0) == 2
    assert seeds_needed(1e6, 1.0) == 2
    # 5% over five comparisons is 1%, and its table says 51 for half a deviation.
    assert seeds_needed(0.5, 1.0, 5) == 51


def test_equal_differences_have_their_value_as_the_interval() -> None:
    assert difference_interval([0.25] * 5) == ((0.25, 0.25), "all differences equal")
    assert difference_interval([0.25]) == (None, "none")


def test_few_seeds_get_the_paired_t_interval_and_more_the_bootstrap() -> None:
    few, name = difference_interval([0.1, 0.2, 0.4])
    assert (few, name) == (t_interval([0.1, 0.2, 0.4]), "paired t")
    values = [0.1, 0.2, 0.4, 0.3, 0.25]
    assert difference_interval(values)[1] == "bootstrap-t"
    assert difference_interval(values) == difference_interval(values)


def test_the_bootstrap_t_interval_moves_and_scales_with_the_data() -> None:
    values = np.random.default_rng(2).normal(size=9)
    low, high = bootstrap_t_interval(values)
    assert bootstrap_t_interval(3 - 2 * values) == pytest.approx((3 - 2 * high, 3 - 2 * low))


def test_the_bootstrap_t_quantiles_are_those_of_all_resamples() -> None:
    # Three values have 27 resamples: all of them, counted, instead of drawn.
    d = np.array([1.0, 2.0, 4.0])
    every = np.array(np.meshgrid(d, d, d)).reshape(3, -1)
    every = every[:, np.ptp(every, axis=0) > 0]
    t = (every.mean(0) - d.mean()) / (every.std(0, ddof=1) / math.sqrt(3))
    se = d.std(ddof=1) / math.sqrt(3)
    # The t* are few and repeated, so that a drawn quantile falls on the same one.
    low, high = np.quantile(t, [0.025, 0.975])
    assert bootstrap_t_interval(d) == pytest.approx((d.mean() - high * se, d.mean() - low * se))


@pytest.mark.parametrize("n", [4, 5, 8])
def test_the_interval_of_a_difference_covers_at_its_rate(n: int) -> None:
    differences = np.random.default_rng(n).normal(loc=0.3, size=(SIMULATIONS, n))
    covered = 0
    for d in differences:
        low, high = bootstrap_t_interval(d, resamples=999)
        covered += low <= 0.3 <= high
    low, high = binomial_bounds(0.95)
    assert low <= covered <= high


@pytest.mark.parametrize("n", [2, 3])
def test_the_paired_t_interval_covers_at_its_rate(n: int) -> None:
    differences = np.random.default_rng(n).normal(loc=0.3, size=(SIMULATIONS, n))
    intervals = [difference_interval(d)[0] for d in differences]
    covered = sum(i is not None and i[0] <= 0.3 <= i[1] for i in intervals)
    low, high = binomial_bounds(0.95)
    assert low <= covered <= high


def null_losses(n: int, together: float, seed: int) -> np.ndarray:
    """Simulated comparisons of a variant with its equal, [SIMULATIONS, 2, n].

    `together` is the correlation of two runs of one seed.
    """
    generator = np.random.default_rng(seed)
    shared = generator.normal(size=(SIMULATIONS, 1, n)) * math.sqrt(together)
    return shared + generator.normal(size=(SIMULATIONS, 2, n)) * math.sqrt(1 - together)


@pytest.mark.parametrize(
    ("n", "together", "rate"),
    [
        # Exact tests: the largest share of permutations that 5% allows. Flips of 6: 2 of 64.
        (6, 0.8, 2 / 64),
        (8, 0.0, 12 / 256),
        # Labels of 2 x 5 unrelated runs: 12 of 252.
        (5, 0.0, 12 / 252),
    ],
)
def test_equal_variants_are_told_apart_at_the_nominal_rate(
    n: int, together: float, rate: float
) -> None:
    found = sum(permutation_p(x, y, 1) < 0.05 for x, y in null_losses(n, together, seed=n))
    low, high = binomial_bounds(rate)
    assert low <= found <= high


def test_related_pairs_make_the_label_test_conservative() -> None:
    found = sum(permutation_p(x, y, 1) < 0.05 for x, y in null_losses(5, 0.6, seed=7))
    assert found <= binomial_bounds(12 / 252)[1]


def test_holm_keeps_the_rate_of_any_false_claim_among_several() -> None:
    # Three variants equal to one baseline: any claim at all is false.
    generator = np.random.default_rng(11)
    losses = generator.normal(size=(SIMULATIONS, 4, 5))
    claims = 0
    for baseline, *variants in losses:
        p = holm([permutation_p(variant, baseline, 3) for variant in variants])
        claims += min(p) < 0.05
    assert claims <= binomial_bounds(0.05)[1]


def test_the_front_holds_what_no_other_point_beats() -> None:
    costs = [1.0, 2.0, 2.0, 3.0, 4.0, 1.0]
    losses = [5.0, 4.0, 4.5, 4.0, 1.0, 5.0]
    # 2 loses to 1 at the same cost, 3 costs more than 1 for the same loss; 0 and 5 are equal.
    assert sorted(pareto_front(costs, losses)) == [0, 1, 4, 5]
    assert pareto_front([], []) == []
