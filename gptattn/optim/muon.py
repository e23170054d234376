"""Muon: orthogonalised momentum.

Two published iterations bring the singular values near 1 and keep the singular vectors.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from gptattn.optim.matrix_rule import MatrixRule, State

Iteration = Literal["polar_express", "newton_schulz"]
Quintic = tuple[float, float, float]  # s -> a s + b s^3 + c s^5

# Jordan et al. 2024, Muon: the same at each step; after five, values are between 0.7 and 1.2.
NEWTON_SCHULZ: Quintic = (3.4445, -4.7750, 2.0315)
# Amsel et al. 2025, arXiv:2505.16932, listing 2: the best for singular values from 1e-3 to 1. The
# last one repeats.
POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Rounding can push singular values above 1, where Polar Express's polynomials grow fast.
SAFETY = 1.01
EPS = 1e-7  # avoids a division by 0, as in both papers' code
# With more, `compute_whitener` fails in float32 at low rank: each step multiplies the rounding
# errors of squared singular values near 0 by up to 69, and below -1 they grow without bound.
MAX_STEPS = 7
# From this ratio of the sides on, products of only the shorter side are faster.
WIDE = 2


class Muon(MatrixRule):
    """The direction of a matrix [m, n] is about rms * sqrt(max(m, n)) U V^T.

    U S V^T is the average gradient a <- momentum a + (1 - momentum) g; `nesterov` takes that
    average one step further. The direction's root mean square is about `rms`, more with fewer than
    five steps; AdamW's is about 0.2, so one learning rate suits both. Matrices of one shape, or its
    transpose, are computed together.

    `steps` steps of `iteration` bring the singular values near 1: on a CPU in float32 or the
    weights' wider format, on a GPU in bfloat16, as in the sources.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; polar_express: Amsel et
    al. 2025, arXiv:2505.16932, listing 2; the scale: Liu et al. 2025, arXiv:2502.16982, sec. 2.2.
    """

    def __init__(
        self,
        momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.95,
        nesterov: bool = True,
        rms: Annotated[float, Meta(gt=0)] = 0.2,
        iteration: Iteration = "polar_express",
        steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 5,
    ) -> None:
        self.momentum, self.nesterov, self.rms = momentum, nesterov, rms
        self._polynomials = choose_polynomials(iteration, steps)

    def new_state(self, matrix: Tensor) -> State:
        return {"momentum": torch.zeros_like(matrix)}

    def directions(self, gradients: list[Tensor], states: list[State]) -> list[Tensor]:
        averages = [state["momentum"] for state in states]
        torch.ops.aten._foreach_lerp_(averages, gradients, 1 - self.momentum)
        if self.nesterov:
            averages = list(torch.ops.aten._foreach_lerp(gradients, averages, self.momentum))
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, x in enumerate(averages):
            groups[min(x.shape), max(x.shape)].append(i)
        directions: list[Tensor] = list(averages)
        for (short, long), members in groups.items():
            same = [averages[i] for i in members]
            x_NPQ = torch.stack([x if len(x) == short else x.mT for x in same])
            y_NPQ = self._orthogonalise(x_NPQ).to(x_NPQ.dtype)
            y_NPQ *= self.rms * max(short, long) ** 0.5
            for i, y_PQ in zip(members, y_NPQ.unbind(), strict=True):
                directions[i] = y_PQ if averages[i].shape == y_PQ.shape else y_PQ.mT
        return directions

    def _orthogonalise(self, x_NPQ: Tensor) -> Tensor:
        """Return the matrices with singular values near 1."""
        P, Q = x_NPQ.shape[1:]
        if x_NPQ.device.type != "cpu":
            return compute_polar_factor(x_NPQ.bfloat16(), self._polynomials)
        # `compute_whitener` works with squares of singular values, which need float32's digits.
        wide_NPQ = x_NPQ.to(torch.promote_types(x_NPQ.dtype, torch.float32))
        if WIDE * P <= Q:
            return compute_whitener(wide_NPQ, self._polynomials) @ wide_NPQ
        return compute_polar_factor(wide_NPQ, self._polynomials)


@dataclass(frozen=True)
class Polynomials:
    """One polynomial per step, for a matrix that is first divided by margin * norm + EPS."""

    quintics: tuple[Quintic, ...]
    margin: float


def choose_polynomials(iteration: Iteration, steps: int) -> Polynomials:
    """Return the published polynomials for this many steps."""
    if iteration == "newton_schulz":
        return Polynomials((NEWTON_SCHULZ,) * steps, 1.0)
    *first, last = POLAR_EXPRESS
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in first]
    return Polynomials((*safe, *[last] * steps)[:steps], SAFETY)


def compute_polar_factor(x_NPQ: Tensor, polynomials: Polynomials) -> Tensor:
    """Return about U V^T for each matrix U S V^T: [N, P, Q] -> [N, P, Q], with P <= Q."""
    x = x_NPQ / _bound_norm(x_NPQ, polynomials)
    for a, b, c in polynomials.quintics:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def compute_whitener(x_NPQ: Tensor, polynomials: Polynomials) -> Tensor:
    """Return W [N, P, P] such that W x is `compute_polar_factor(x)`.

    All products but the first are [P, P], so for P well below Q it takes less work. It squares
    singular values, so in float32 it loses those below 1e-4 of the largest; take at most MAX_STEPS
    steps there.
    """
    scale = _bound_norm(x_NPQ, polynomials)
    x = x_NPQ / scale
    first, *later = polynomials.quintics
    gram = x @ x.mT
    total = factor = _compute_factor(gram, first)
    for quintic in later:
        gram = factor @ gram @ factor
        factor = _compute_factor(gram, quintic)
        total = factor @ total
    return total / scale


def _compute_factor(gram: Tensor, quintic: Quintic) -> Tensor:
    """Return a + b gram + c gram^2, the factor of x in a step."""
    a, b, c = quintic
    factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor


def _bound_norm(x_NPQ: Tensor, polynomials: Polynomials) -> Tensor:
    """Return a bound [N, 1, 1] on the largest singular value."""
    return x_NPQ.norm(dim=(-2, -1), keepdim=True) * polynomials.margin + EPS
