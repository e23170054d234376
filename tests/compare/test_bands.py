"""Mean and band of curves over the seeds, checked by hand."""

import numpy as np
import pytest

from gptattn.compare.curves import Band, average_curves


def test_bands_by_hand() -> None:
    x = np.array([0.0, 1.0, 2.0])
    ys = [np.array([1.0, 2.0, 3.0]), np.array([3.0, 4.0, 5.0]), np.array([2.0, 3.0, 4.0])]
    found = average_curves([x] * 3, ys)
    assert isinstance(found, Band)
    assert found.mean.tolist() == [2.0, 3.0, 4.0]
    # The deviation of 1, 2 and 3 is 1; half the band is t(0.975, 2) = 4.30265 / sqrt(3).
    assert found.low is not None
    assert found.low[0] == pytest.approx(2.0 - 4.30265 / 3**0.5, abs=1e-4)


def test_two_seeds_are_drawn_as_they_are_without_a_band() -> None:
    x = np.array([0.0, 1.0])
    found = average_curves([x, x], [np.array([1.0, 2.0]), np.array([3.0, 4.0])])
    assert found is not None
    assert (found.n, found.low, found.high) == (2, None, None)
    assert found.seeds.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_curves_on_different_grids_meet_where_both_are() -> None:
    found = average_curves([np.array([0.0, 4.0]), np.array([1.0, 6.0])], [np.array([0.0, 4.0])] * 2)
    assert found is not None
    assert (found.x[0], found.x[-1]) == (1.0, 4.0)
    # The lines are x and 0.8 (x - 1); at x = 1 they are 1 and 0.
    assert found.mean[0] == pytest.approx(0.5)
    one = average_curves([np.array([0.0, 1.0])], [np.array([2.0, 1.0])])
    assert one is not None
    assert (one.n, one.low, one.high) == (1, None, None)
    assert (
        average_curves([np.array([0.0, 1.0]), np.array([2.0, 3.0])], [np.array([1.0, 1.0])] * 2)
        is None
    )
    assert average_curves([], []) is None
