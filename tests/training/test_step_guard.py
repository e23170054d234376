"""A guard that leaves its decisions to the device does what one on the host does, one step late."""

import pytest
import torch
from torch import Tensor, nn

from gptattn.errors import NumericError
from gptattn.training.datamodule import RunDataModule
from gptattn.training.step_guard import DeviceGuard, HostGuard, StepGuard

MOST = 0.7  # the norm of all gradients


class Loop:
    """Two tensors under AdamW, trained by gradients that the test gives."""

    def __init__(self, guard: StepGuard) -> None:
        self.guard, self.step = guard, 0
        self.weights = [nn.Parameter(torch.linspace(-1, 1, n)) for n in (5, 7)]
        self.optimizer = torch.optim.AdamW(self.weights, lr=0.1, fused=True)

    def train(self, gradients: list[Tensor], losses: tuple[float, ...] = (1.0,)) -> None:
        self.step += 1
        for loss in losses:
            self.guard.see_loss(self.step, torch.tensor(loss))
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient.clone()
        norm = nn.utils.get_total_norm(gradients)
        self.guard.clip(self.step, norm, MOST, self.weights, self.optimizer)
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        averages = [x for p in self.weights for x in self.optimizer.state[p].values()]
        return [x.detach().clone() for x in (*self.weights, *averages)]


def gradients(size: float) -> list[Tensor]:
    """Gradients whose norm is about 3.5 times `size`."""
    return [size * torch.randn(5), size * torch.randn(7)]


def test_updates_are_those_of_a_guard_on_the_host_clipped_or_not() -> None:
    host, device = Loop(HostGuard()), Loop(DeviceGuard())
    for size in (0.01, 2.0, 0.2, 50.0, 0.001):
        given = gradients(size)
        host.train(given)
        device.train(given)
        for one, other in zip(host.state(), device.state(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    device.guard.settle()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_update_follows_a_bad_gradient_which_is_reported_one_step_late(bad: float) -> None:
    loop = Loop(DeviceGuard())
    for _ in range(3):
        loop.train(gradients(0.3))
    before = loop.state()
    poisoned = gradients(0.3)
    poisoned[1][2] = bad
    loop.train(poisoned)
    with pytest.raises(NumericError, match=r"^train/grad_norm: is (nan|inf) at step 4; "):
        loop.train(gradients(0.3))
    assert all(torch.equal(one, other) for one, other in zip(before, loop.state(), strict=True))


def test_the_update_after_a_bad_one_is_left_out_even_if_nobody_has_looked() -> None:
    loop = Loop(DeviceGuard())
    loop.train(gradients(0.3))
    before = loop.state()
    loop.train(gradients(0.3), losses=(1.0, float("nan"), 2.0))
    loop.guard.settle = lambda: None  # type: ignore[method-assign]
    for _ in range(2):
        loop.train(gradients(0.3))
    assert all(torch.equal(one, other) for one, other in zip(before, loop.state(), strict=True))
    with pytest.raises(NumericError, match=r"^train/loss: is nan at step 2; "):
        DeviceGuard.settle(loop.guard)  # type: ignore[arg-type]


def test_before_a_row_or_a_save_the_newest_step_is_looked_at() -> None:
    loop = Loop(DeviceGuard())
    loop.guard.settle()
    loop.train(gradients(0.3), losses=(float("inf"),))
    with pytest.raises(NumericError, match=r"^train/loss: is inf at step 1; "):
        loop.guard.settle()


def test_batches_for_a_gpu_are_pinned_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self + 100)
    batch = torch.tensor([1]), torch.tensor([2])
    for pinned, expected in ((True, [101, 102]), (False, [1, 2])):
        module = RunDataModule(
            None,  # type: ignore[arg-type]
            seed=1,
            batch_size=1,
            val_batch_size=1,
            context_length=1,
            pinned=pinned,
        )
        assert [int(x) for x in module.on_before_batch_transfer(batch, 0)] == expected
