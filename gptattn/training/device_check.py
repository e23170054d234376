"""Checks that layers compute on a run's device, in its precision, what they do on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gptattn.settings.config import TrainConfig
from gptattn.training.contract import (
    TOKENS,
    CannotRun,
    Stack,
    draw_layers,
    explain,
    list_stacks,
    run,
    shorten,
)
from gptattn.training.preflight import DTYPES

# The most that differs, relative to the norm on the CPU, by what rounds the products: three times
# what the mechanisms of the menu do.
LIMITS = {"highest": 1e-3, "high": 0.01, "medium": 0.06}  # of trainer.matmul_precision
LIMITS |= {"32-true": 1e-3, "64-true": 1e-3, "16-mixed": 0.01}
LIMITS |= {"bf16-mixed": 0.06, "bf16-true": 0.06}
CHOICES = 0.4  # where rounding may flip the choices of a few tokens, as the top-k of dsa
# Of the root mean square of the largest gradient: below, as where sums cancel, rounding is most.
FLOOR = 0.1


def check_on_device(cfg: TrainConfig, device: torch.device) -> None:
    """Check that each kind of layer computes on the run's device what it does on a CPU in float32.

    Compared are outputs and gradients of the same weights, in the run's precision and backend, at
    the model's width, because kernels differ by the size of a head, and in evaluation mode, because
    devices draw other masks. What cannot be built is left to `build_model`. Raises a BrokenLayer,
    or ForeignError for an error in the user's own file.
    """
    precision = cfg.trainer.precision
    if (device.type, precision) == ("cpu", "32-true"):
        return
    mixed = precision.endswith("-mixed")
    stored = torch.float32 if mixed else DTYPES[precision]
    with _numerics(cfg, device):
        try:
            layers = draw_layers(cfg)
        except Exception:
            return
        for stack in list_stacks(layers, cfg):
            rounding = max(LIMITS[precision], LIMITS[cfg.trainer.matmul_precision])
            limit = CHOICES if stack.stops_gradient else rounding
            modules, last = nn.ModuleList(stack.layers).eval().to(stored), stack.layers[-1]
            x = torch.randn(2, min(TOKENS, last.context_length), last.d_in, dtype=stored)
            pull = torch.randn(*x.shape[:2], last.d_out)
            try:
                modules.float()
                expected = _differentiate(stack, modules, x.float(), pull)
                modules.to(device, stored)
                with torch.autocast(device.type, DTYPES[precision], enabled=mixed):
                    found = _differentiate(stack, modules, x.to(device), pull)
            except CannotRun as error:
                raise explain(error) from error.__cause__
            least = FLOOR * max(_norm(one) / one.numel() ** 0.5 for one in expected.values())
            far = {
                name: _norm(found[name] - one) / max(_norm(one), least * one.numel() ** 0.5)
                for name, one in expected.items()
            }
            worst = max(far, key=lambda name: far[name] if far[name] == far[name] else torch.inf)
            if not far[worst] <= limit:
                raise stack.fail(
                    f"gives other results on {device.type} in {precision} than on the CPU in "
                    f"float32: {worst} differs by {far[worst]:.2g} of its norm, where rounding "
                    f"explains {limit:g}; choose another backend or trainer.precision"
                )


def _norm(x: Tensor) -> float:
    return float(x.norm())


def _differentiate(stack: Stack, modules: nn.Module, x: Tensor, pull: Tensor) -> dict[str, Tensor]:
    """Return the outputs for x, and all gradients of their product with `pull`, by name."""
    modules.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = run(stack, x).float()
    if y.requires_grad:
        with torch.autocast(x.device.type, enabled=False):
            (y * pull.to(x.device)).sum().backward()
    found = {"its output": y.detach()}
    for name, leaf in {"x": x, **dict(modules.named_parameters())}.items():
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        found[f"the gradient of {shorten(name)}"] = gradient.clone()
    return {name: one.float().cpu() for name, one in found.items()}


@contextmanager
def _numerics(cfg: TrainConfig, device: torch.device) -> Iterator[None]:
    """Round products as the run will in this block; restore that and the random state after it."""
    before = torch.get_float32_matmul_precision()
    if cfg.trainer.deterministic:  # Lightning's value, which cuBLAS reads at its first product
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_float32_matmul_precision(cfg.trainer.matmul_precision)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
