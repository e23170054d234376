"""Polynomials that bring the singular values of a matrix near 1, and leave its singular vectors."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Iteration = Literal["polar_express", "newton_schulz"]
Quintic = tuple[float, float, float]  # s -> a s + b s^3 + c s^5

# Jordan et al. 2024, Muon: the same at each step. Values between 0.7 and 1.2, after five.
NEWTON_SCHULZ: Quintic = (3.4445, -4.7750, 2.0315)
# Amsel et al. 2025, arXiv:2505.16932, listing 2: the best for singular values from 1e-3 to 1.
POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115951949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# With more, `whitener` fails in float32 where the rank is low: each step multiplies the rounding
# errors of the squares of singular values near 0 by up to 69, and below -1 they grow without end.
MOST_STEPS = 7
TINY = 1e-30  # keeps 0 from a division by 0
MARGIN = 1.01  # rounding may bring singular values above 1, where the polynomials grow fast


def quintics(iteration: Iteration, steps: int) -> list[Quintic]:
    """Return the polynomials of so many steps."""
    if iteration == "newton_schulz":
        return [NEWTON_SCHULZ] * steps
    known = [*POLAR_EXPRESS[:steps], *[POLAR_EXPRESS[-1]] * (steps - len(POLAR_EXPRESS))]
    *early, last = known
    return [(a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in early] + [last]


def polar_factor(x_NPQ: Tensor, steps: Sequence[Quintic]) -> Tensor:
    """Return about U V^T for each matrix U S V^T: [N, P, Q] -> [N, P, Q], with P <= Q."""
    x = x_NPQ / scale(x_NPQ)
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def whitener(x_NPQ: Tensor, steps: Sequence[Quintic]) -> Tensor:
    """Return W [N, P, P] of which W x is `polar_factor(x)`.

    All products are of [P, P] but the first, so for P well below Q it takes less work. Singular
    values below 1e-4 of the largest are lost in float32, since it works with their squares. Give at
    most MOST_STEPS there.
    """
    size = scale(x_NPQ)
    x = x_NPQ / size
    gram, total = x @ x.mT, None
    for i, (a, b, c) in enumerate(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        total = factor if total is None else factor @ total
        if i < len(steps) - 1:
            gram = factor @ gram @ factor
    assert total is not None
    return total / size


def scale(x_NPQ: Tensor) -> Tensor:
    """Return a bound [N, 1, 1] of the largest singular value."""
    return x_NPQ.norm(dim=(-2, -1), keepdim=True) * MARGIN + TINY
