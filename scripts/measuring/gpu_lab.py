"""What the GPU's cells share: the device, sizes, models, a clock, and plain training loops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gptattn.build.model import build_model
from gptattn.model.gpt import GPT
from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig

Cell = dict[str, Any]  # plain values, for JSON; a check's `ok` says whether it holds
Step = Callable[[Tensor, Tensor], None]  # of ids and targets [rows, tokens]
CLIP = 1.0
SMALL = ("model.num_layers=2", "model.num_heads=4", "model.d_model=32", "model.context_length=64")


@dataclass(frozen=True)
class Lab:
    """The device and the sizes. `tiny`: sizes for a CPU, to see that everything runs."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def half(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def size(self, real: int, tiny: int) -> int:
        """Return one of the two numbers."""
        return tiny if self.tiny else real

    def settings(self, *overrides: str) -> TrainConfig:
        """Return settings of GPT-2 small with these overrides."""
        sizes = ("model=tiny", *SMALL) if self.tiny else ("model=gpt2_small",)
        trainer = "trainer=gpu" if self.on_gpu else "trainer=cpu"
        return settings([*sizes, trainer, *overrides])

    def model(self, *overrides: str, vocab_size: int = 50304) -> GPT:
        """Build a model of random weights, the same for equal arguments."""
        torch.manual_seed(0)
        return build_model(self.settings(*overrides), self.size(vocab_size, 64)).to(self.device)

    def compile(self, module: nn.Module) -> None:
        """Compile the module in place; with tiny sizes that would take most of the time."""
        if not self.tiny:
            module.compile()

    def batch(self, rows: int, tokens: int, vocab_size: int = 50304) -> tuple[Tensor, Tensor]:
        """Return random ids and targets [rows, tokens] on the device."""
        ids = torch.randint(self.size(vocab_size, 64), (rows, tokens + 1), device=self.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the most memory that a call adds to what is allocated; 0 on a CPU."""
        if not self.on_gpu:
            work()
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before


def error_of(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference, relative to that of the right values."""
    right = right.double()
    return ((found.double() - right).norm() / right.norm().clamp_min(1e-30)).item()


def training_step(
    lab: Lab,
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    losses: list[Tensor] | None = None,
) -> Step:
    """Return a step of a plain loop with clipping and fused AdamW, in which nothing waits.

    Each step adds its loss to `losses`.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(ids: Tensor, targets: Tensor) -> None:
        with torch.autocast(lab.device.type, torch.bfloat16, enabled=lab.on_gpu):
            loss = loss_of(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if losses is not None:
            losses.append(loss.detach())

    return step
