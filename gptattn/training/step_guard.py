"""Keeps a NaN or an infinity out of the weights, and clips the gradients."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gptattn.errors import NumericError


def not_finite(name: str, value: float, step: int) -> NumericError:
    """Return the error that the metric `name` has this value at this step."""
    return NumericError(
        name,
        f"is {value} at step {step}; try a lower optim.lr or optim.grad_clip, or "
        "trainer.precision=32-true",
    )


class StepGuard(ABC):
    """Is shown the losses and the gradients' norm of each step before the optimizer's update.

    No update follows one that is not finite. Steps count from 1.
    """

    @abstractmethod
    def see_loss(self, step: int, loss: Tensor) -> None:
        """Look at a micro-batch's loss before its backward pass."""

    @abstractmethod
    def clip(
        self,
        step: int,
        norm: Tensor,
        most: float,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Look at the norm of all gradients, and make the update one by gradients of norm `most`.

        Raises NumericError for a step that is not finite: this one, or one before it.
        """

    @abstractmethod
    def settle(self) -> None:
        """Raise NumericError if any step so far was not finite. May wait for the device."""


class HostGuard(StepGuard):
    """Looks at each number at once; `overflows`: the norm may be infinite, as for float16.

    The loss scaler skips such a step. On a GPU the host waits for the device at each look.
    """

    def __init__(self, overflows: bool = False) -> None:
        self._overflows = overflows

    def see_loss(self, step: int, loss: Tensor) -> None:
        if not torch.isfinite(loss):
            raise not_finite("train/loss", loss.item(), step)

    def clip(
        self,
        step: int,
        norm: Tensor,
        most: float,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if not self._overflows and not torch.isfinite(norm):
            raise not_finite("train/grad_norm", norm.item(), step)
        # Not clip_grad_norm_, which multiplies the gradients even if nothing is to be clipped.
        if norm > most:
            nn.utils.clip_grads_with_norm_(parameters, most, norm)

    def settle(self) -> None:
        pass


class DeviceGuard(StepGuard):
    """Leaves looking and clipping to the device; the host learns of a bad step one step late.

    Needs fused AdamW for all parameters: its kernel divides the gradients by `grad_scale`, and
    leaves weights and averages alone where `found_inf` is 1, as for a loss scaler. Here that is so
    from the first bad step on, so the weights stay those before it.
    """

    def __init__(self) -> None:
        self._loss: Tensor | None = None  # of the step in progress
        # (step, loss, norm) of the first bad step, or zeros: on the device, and its newest copy.
        self._first: Tensor | None = None
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None  # None where the host is the device

    def see_loss(self, step: int, loss: Tensor) -> None:
        seen = loss.detach().double()
        self._loss = seen if self._loss is None else self._loss + seen

    def clip(
        self,
        step: int,
        norm: Tensor,
        most: float,
        parameters: Sequence[nn.Parameter],
        optimizer: Any,
    ) -> None:
        self.settle()  # the step before: this one's work waits in the device's queue meanwhile
        assert self._loss is not None
        now = torch.stack([torch.full_like(self._loss, step), self._loss, norm.double()])
        before = torch.zeros_like(now) if self._first is None else self._first
        bad = (before[0] == 0) & ~now.isfinite().all()
        self._first, self._loss = torch.where(bad, now, before), None
        # The factor of clip_grads_with_norm_.
        optimizer.grad_scale = ((norm + 1e-6) / most).clamp(min=1).float()
        optimizer.found_inf = (self._first[0] > 0).float()
        self._copy = self._first.to("cpu", non_blocking=True)  # into pinned memory
        if self._first.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def settle(self) -> None:
        if self._copy is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        step, loss, norm = self._copy.tolist()
        if step:
            name, value = ("train/grad_norm", norm) if math.isfinite(loss) else ("train/loss", loss)
            raise not_finite(name, value, int(step))
