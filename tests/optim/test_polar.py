"""The iterations against their published text, and a singular value decomposition in float64."""

import pytest
import torch
from torch import Tensor

from gptattn.optim.polar import (
    MAX_STEPS,
    Iteration,
    choose_polynomials,
    compute_polar_factor,
    compute_whitener,
)

SHAPES = [(5, 5), (4, 9), (3, 40)]


def jordan(x: Tensor, steps: int) -> Tensor:
    """Newton-Schulz as https://kellerjordan.github.io/posts/muon has it, but for bfloat16."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def amsel(x: Tensor, steps: int) -> Tensor:
    """Polar Express as listing 2 of arXiv:2505.16932 has it, but for bfloat16."""
    listed = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ]
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in listed[:-1]] + [listed[-1]]
    x = x / (x.norm() * 1.01 + 1e-7)
    for a, b, c in safe[:steps] + [safe[-1]] * (steps - len(safe)):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize(
    ("iteration", "published"), [("newton_schulz", jordan), ("polar_express", amsel)]
)
@pytest.mark.parametrize("steps", [1, 5, 8, 10])
def test_each_number_of_steps_is_the_published_one(iteration, published, steps):
    # Small, so that the 1e-7 beside the norm shows.
    x = 1e-5 * torch.randn(3, 4, 9, dtype=torch.float64)
    polynomials = choose_polynomials(iteration, steps)
    expected = torch.stack([published(one, steps) for one in x])
    torch.testing.assert_close(compute_polar_factor(x, polynomials), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(compute_whitener(x, polynomials) @ x, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_enough_steps_give_the_polar_factor(shape: tuple[int, int]) -> None:
    x = torch.randn(3, *shape, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    found = compute_polar_factor(x, choose_polynomials("polar_express", 14))
    torch.testing.assert_close(found, u @ vh, rtol=0, atol=1e-10)


@pytest.mark.parametrize("iteration", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize("rank", [1, 29])
def test_in_float32_the_most_steps_keep_a_low_rank(iteration: Iteration, rank: int) -> None:
    wide, narrow = torch.randn(3, rank, 131).double(), torch.randn(3, 31, rank).double()
    x, polynomials = narrow @ wide, choose_polynomials(iteration, MAX_STEPS)
    exact, single = compute_polar_factor(x, polynomials), x.float()
    for y in (
        compute_polar_factor(single, polynomials),
        compute_whitener(single, polynomials) @ single,
    ):
        assert (y - exact).norm() < 0.02 * exact.norm()


def test_a_matrix_of_zeros_stays_one() -> None:
    x, polynomials = torch.zeros(2, 3, 8), choose_polynomials("polar_express", 5)
    assert torch.equal(compute_polar_factor(x, polynomials), x)
    assert torch.equal(compute_whitener(x, polynomials) @ x, x)
