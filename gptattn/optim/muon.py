"""Muon: momentum whose matrices are made orthogonal."""

from collections import defaultdict
from typing import Literal, get_args

import torch
from torch import Tensor

from gptattn.optim.matrix_rule import MatrixRule, State
from gptattn.optim.polar import (
    MAX_STEPS,
    Iteration,
    choose_polynomials,
    compute_polar_factor,
    compute_whitener,
)

Format = Literal["weights", "bfloat16"]
# With at least this ratio of the sides, products of the shorter side only are faster.
WIDE = 2


class Muon(MatrixRule):
    """The direction of a matrix [m, n] is rms * sqrt(max(m, n)) times about U V^T of U S V^T.

    U S V^T is the average gradient m <- momentum m + (1 - momentum) g, with `nesterov` that average
    taken one step further. The direction's numbers have about the root mean square `rms`, more with
    fewer than five steps; AdamW's have about 0.2, so that one learning rate suits both. Matrices of
    one shape, or its transpose, are computed together.

    `steps` steps of `iteration` bring the singular values near 1, in float32 or the weights' wider
    format; with `dtype=bfloat16` in that, as in the sources. Raises ValueError for a value out of
    range.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; polar_express: Amsel et
    al. 2025, arXiv:2505.16932, listing 2; the scale: Liu et al. 2025, arXiv:2502.16982, sec. 2.2.
    """

    def __init__(
        self,
        momentum: float = 0.95,
        nesterov: bool = True,
        rms: float = 0.2,
        iteration: Iteration = "polar_express",
        steps: int = 5,
        dtype: Format = "weights",
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} is out of range; give 0 or more, below 1")
        if not 0 < rms < float("inf"):
            raise ValueError(f"rms={rms} must be a positive number, such as 0.2")
        if iteration not in get_args(Iteration):
            raise ValueError(f"iteration={iteration} is unknown; one of {get_args(Iteration)}")
        if dtype not in get_args(Format):
            raise ValueError(f"dtype={dtype} is unknown; one of {get_args(Format)}")
        if not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"steps={steps} is out of range; give 1 to {MAX_STEPS}")
        self.momentum, self.nesterov, self.rms = momentum, nesterov, rms
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else None
        self._polynomials = choose_polynomials(iteration, steps)

    def state_shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        return {"momentum": tuple(shape)}

    def directions(self, gradients: list[Tensor], states: list[State]) -> list[Tensor]:
        averages = [
            state["momentum"].lerp_(gradient, 1 - self.momentum)
            for gradient, state in zip(gradients, states, strict=True)
        ]
        if self.nesterov:
            averages = [g.lerp(m, self.momentum) for g, m in zip(gradients, averages, strict=True)]
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, x in enumerate(averages):
            groups[min(x.shape), max(x.shape)].append(i)
        found: list[Tensor] = list(averages)
        for (short, long), members in groups.items():
            x_NPQ = torch.stack([_lay_flat(averages[i]) for i in members])
            y_NPQ = self._orthogonalise(x_NPQ).to(x_NPQ.dtype)
            y_NPQ *= self.rms * max(short, long) ** 0.5
            for i, y_PQ in zip(members, y_NPQ.unbind(), strict=True):
                found[i] = y_PQ if averages[i].shape == y_PQ.shape else y_PQ.mT
        return found

    def _orthogonalise(self, x_NPQ: Tensor) -> Tensor:
        """Return the matrices with singular values near 1."""
        P, Q = x_NPQ.shape[1:]
        if self.dtype is not None:
            return compute_polar_factor(x_NPQ.to(self.dtype), self._polynomials)
        # `compute_whitener` works with squares of singular values, which need float32's digits.
        wide_NPQ = x_NPQ.to(torch.promote_types(x_NPQ.dtype, torch.float32))
        if WIDE * P <= Q:
            return compute_whitener(wide_NPQ, self._polynomials) @ wide_NPQ
        return compute_polar_factor(wide_NPQ, self._polynomials)


def _lay_flat(x: Tensor) -> Tensor:
    """Return the matrix, transposed if taller than wide."""
    return x if x.shape[0] <= x.shape[1] else x.mT
