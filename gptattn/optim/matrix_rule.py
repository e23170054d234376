"""Rules that update the layers' matrices in place of AdamW, the optimizer that combines them with
AdamW, and which parameters decay.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


class MatrixRule(ABC):
    """Turns the gradients of matrices into the directions of their updates."""

    @abstractmethod
    def new_state(self, matrix: Tensor) -> State:
        """Return the matrix's state before its first update; the optimizer adds a `step`."""

    @abstractmethod
    def directions(self, gradients: list[Tensor], states: list[State]) -> list[Tensor]:
        """Return each matrix's direction, which is subtracted times lr; update the states."""


def split_by_decay(
    parameters: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that decay, which are the matrices, and the others.

    A gain, a bias or the kernel [C, 1, K] of a short convolution is not a matrix; an embedding is.
    """
    parameters = list(parameters)
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


class CombinedAdamW(torch.optim.AdamW):
    """AdamW, with `rule` for the parameters of the group marked `by_rule`.

    Weight decay is decoupled in both: a weight shrinks by lr * weight_decay of itself.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], rule: MatrixRule, **adamw: Any) -> None:
        super().__init__(groups, **adamw)
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step; the gradients of the rule's parameters are dropped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group.get("by_rule"):
                self._step_by_rule(group)
        super().step()  # it skips parameters without a gradient
        return loss

    def _step_by_rule(self, group: dict[str, Any]) -> None:
        matrices: list[nn.Parameter] = [p for p in group["params"] if p.grad is not None]
        for p in matrices:
            if not self.state[p]:
                # AdamW looks for a step in every state; bfloat16 cannot count beyond 256.
                step = p.new_zeros((), dtype=torch.float32)
                self.state[p] = {"step": step, **self.rule.new_state(p)}
        gradients = [p.grad for p in matrices if p.grad is not None]
        directions = self.rule.directions(gradients, [self.state[p] for p in matrices])
        if matrices:  # a list per call: one kernel each on a GPU
            torch.ops.aten._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch.ops.aten._foreach_sub_(matrices, directions, alpha=group["lr"])
            torch.ops.aten._foreach_add_([self.state[p]["step"] for p in matrices], 1)
        for p in matrices:
            p.grad = None
