"""Muon: momentum whose matrices are made orthogonal."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from gptattn.optim.matrix_rule import MatrixRule, State
from gptattn.optim.polar import (
    EPS,
    MAX_STEPS,
    Iteration,
    choose_polynomials,
    polar_factor,
    whitener,
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
    format; with `dtype=bfloat16` in that, as in the sources. With `every=n` only every n-th step
    computes the correction, and those between reuse it, unless weights are narrower than float32.
    Raises ValueError for a value out of range.

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
        every: int = 1,
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
        if every < 1:
            raise ValueError(f"every={every} is out of range; give 1 or more")
        if every > 1 and dtype == "bfloat16":
            raise ValueError(f"every={every} needs more digits than dtype=bfloat16 has; give 1")
        self.momentum, self.nesterov, self.rms = momentum, nesterov, rms
        self.every, self.dtype = every, torch.bfloat16 if dtype == "bfloat16" else None
        self._polynomials = choose_polynomials(iteration, steps)

    def state_shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        kept: dict[str, tuple[int, ...]] = {"momentum": tuple(shape)}
        if self.every > 1:
            kept["whitener"] = (min(shape), min(shape))
        return kept

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
            flat = [_lay_flat(averages[i]) for i in members]
            x_NPQ = torch.stack(flat)
            y_NPQ = self._orthogonal(x_NPQ, [states[i] for i in members]).to(x_NPQ.dtype)
            y_NPQ *= self.rms * max(short, long) ** 0.5
            for i, y_PQ in zip(members, y_NPQ.unbind(), strict=True):
                found[i] = y_PQ if averages[i].shape == y_PQ.shape else y_PQ.mT
        return found

    def _orthogonal(self, x_NPQ: Tensor, states: Sequence[State]) -> Tensor:
        """Return the matrices with singular values near 1."""
        P, Q = x_NPQ.shape[1:]
        if self.dtype is not None:
            return polar_factor(x_NPQ.to(self.dtype), self._polynomials)
        # `whitener` works with squares of singular values, which need float32's digits.
        wide_NPQ = x_NPQ.to(torch.promote_types(x_NPQ.dtype, torch.float32))
        if self.every > 1 and wide_NPQ is x_NPQ:
            return self._now_and_then(x_NPQ, states)
        if WIDE * P <= Q:
            return whitener(wide_NPQ, self._polynomials) @ wide_NPQ
        return polar_factor(wide_NPQ, self._polynomials)

    def _now_and_then(self, x_NPQ: Tensor, states: Sequence[State]) -> Tensor:
        step = int(states[0]["step"])
        if step % self.every == 0:
            for state, own in zip(states, whitener(x_NPQ, self._polynomials), strict=True):
                state["whitener"].copy_(own)
        y_NPQ = torch.stack([state["whitener"] for state in states]) @ x_NPQ
        if step % self.every == 0:
            return y_NPQ
        # What the last correction did not cover may have grown a thousandfold: rescale the matrix
        # to the size of an orthogonal one.
        size = y_NPQ.norm(dim=(-2, -1), keepdim=True) + EPS
        return y_NPQ * (x_NPQ.shape[1] ** 0.5 / size)


def _lay_flat(x: Tensor) -> Tensor:
    """Return the matrix, transposed if taller than wide."""
    return x if x.shape[0] <= x.shape[1] else x.mT
