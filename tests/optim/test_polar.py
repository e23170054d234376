"""The iterations against the polar factor of a singular value decomposition in float64."""

import pytest
import torch
from torch import Tensor

from gptattn.optim.polar import MOST_STEPS, Iteration, polar_factor, quintics, whitener

SHAPES = [(5, 5), (4, 9), (3, 40)]


def with_values(values_NP: Tensor, Q: int) -> tuple[Tensor, Tensor]:
    """Random matrices [N, P, Q] with these singular values, and their polar factors."""
    N, P = values_NP.shape
    u, _ = torch.linalg.qr(torch.randn(N, P, P, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(N, Q, P, dtype=torch.float64))
    return (u * values_NP[:, None]) @ v.mT, u @ v.mT


@pytest.mark.parametrize("shape", SHAPES)
def test_enough_steps_give_the_polar_factor(shape: tuple[int, int]) -> None:
    x, expected = with_values(7 * torch.rand(3, shape[0], dtype=torch.float64) + 0.1, shape[1])
    steps = quintics("polar_express", 12)
    torch.testing.assert_close(polar_factor(x, steps), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(whitener(x, steps) @ x, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("iteration", "least", "most"), [("polar_express", 0.84, 1.13), ("newton_schulz", 0.3, 1.21)]
)
def test_five_steps_bring_singular_values_near_one_and_keep_the_vectors(
    iteration: Iteration, least: float, most: float
) -> None:
    x, factor = with_values(torch.logspace(-2.5, 0, 12, dtype=torch.float64)[None], 12)
    y = polar_factor(x, quintics(iteration, 5))
    values = torch.linalg.svdvals(y)
    assert least < values.min()
    assert values.max() < most
    # y = U f(S) V^T: then y^T U V^T = V f(S) V^T is symmetric.
    symmetric = y.mT @ factor
    torch.testing.assert_close(symmetric, symmetric.mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("iteration", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_float32_both_forms_are_the_float64_one(
    iteration: Iteration, shape: tuple[int, int]
) -> None:
    x = torch.randn(4, *shape, dtype=torch.float64)
    steps = quintics(iteration, 5)
    exact, narrow = polar_factor(x, steps), x.float()
    for y in (polar_factor(narrow, steps), whitener(narrow, steps) @ narrow):
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=2e-4)


@pytest.mark.parametrize("iteration", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize("rank", [1, 7, 29])
def test_in_float32_the_most_steps_keep_a_low_rank(iteration: Iteration, rank: int) -> None:
    wide, narrow = torch.randn(3, rank, 131).double(), torch.randn(3, 31, rank).double()
    x, steps = narrow @ wide, quintics(iteration, MOST_STEPS)
    exact = polar_factor(x, steps)
    for y in (polar_factor(x.float(), steps), whitener(x.float(), steps) @ x.float()):
        assert (y - exact).norm() < 0.02 * exact.norm()


def test_a_matrix_of_zeros_stays_one() -> None:
    x, steps = torch.zeros(2, 3, 8), quintics("polar_express", 5)
    assert torch.equal(polar_factor(x, steps), x)
    assert torch.equal(whitener(x, steps) @ x, x)


def test_steps_beyond_those_that_are_listed_repeat_the_last() -> None:
    assert len(quintics("polar_express", 11)) == 11
    assert quintics("polar_express", 11)[-1] == (1.875, -1.25, 0.375)
