"""The LightningModule: loss, validation, optimizer and schedule of one language model."""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from gptattn.budget import learning_rate_factor
from gptattn.config import OptimConfig
from gptattn.data.sampler import Batch
from gptattn.errors import NumericError
from gptattn.gpt import GPT


class LanguageModel(L.LightningModule):
    """Trains a GPT on batches (ids [B, T], targets [B, T]).

    `progress(step)` is the share of the budget used when that step (from 1) is taken, 0 to 1. It
    drives the learning rate, so that runs by seconds and by steps follow the same curve. Raises
    NumericError at the step whose loss or gradient is not finite: before the optimizer has taken
    it.
    """

    def __init__(
        self,
        model: GPT,
        optim: OptimConfig,
        progress: Callable[[int], float],
        loss_chunk_tokens: int,
        val_bytes: int,
    ) -> None:
        super().__init__()
        self.model, self.optim, self.progress = model, optim, progress
        self.loss_chunk_tokens, self.val_bytes = loss_chunk_tokens, val_bytes
        self.train_losses: list[Tensor] = []  # since the last log row; the logger empties it
        self.grad_norm = torch.tensor(0.0)
        self.lr = 0.0
        self.val_metrics: dict[str, float] = {}
        self._val_nats, self._val_tokens = 0.0, 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ids, targets = batch
        loss = self.model.loss(ids, targets, self.loss_chunk_tokens)
        self._check_finite("train/loss", loss)
        self.train_losses.append(loss.detach())
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Clipping here, not in the Trainer, keeps the norm for the log without a second pass.
        # The scheduler moves on before the callbacks run: this is the rate the step is taken with.
        self.lr = optimizer.param_groups[0]["lr"]
        self.grad_norm = nn.utils.clip_grad_norm_(self.parameters(), self.optim.grad_clip)
        self._check_finite("train/grad_norm", self.grad_norm)

    def _check_finite(self, name: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            raise NumericError(
                name,
                f"is {value.item()} at step {self.global_step + 1}; a lower optim.lr or "
                "optim.grad_clip, or trainer.precision=32-true, would be steadier",
            )

    def on_validation_epoch_start(self) -> None:
        self._val_nats, self._val_tokens = 0.0, 0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        ids, targets = batch
        loss = self.model.loss(ids, targets, self.loss_chunk_tokens)
        self._val_nats += loss.item() * targets.numel()
        self._val_tokens += targets.numel()

    def on_validation_epoch_end(self) -> None:
        loss = self._val_nats / self._val_tokens
        if not math.isfinite(loss):
            raise NumericError("val/loss", f"is {loss} after step {self.global_step}")
        self.val_metrics = {
            "val/loss": loss,
            "val/perplexity": math.exp(min(loss, 700.0)),  # above, a float overflows
            "val/bits_per_byte": self._val_nats / math.log(2) / self.val_bytes,
        }

    def configure_optimizers(self) -> Any:
        """AdamW with decay on matrices only. Source: Radford et al. 2018 (GPT), sec. 4.1."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optim = self.optim
        optimizer = torch.optim.AdamW(
            groups,
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _lr_factor(self, steps_taken: int) -> float:
        return learning_rate_factor(
            self.progress(steps_taken + 1),
            self.optim.warmup_fraction,
            self.optim.final_lr_fraction,
        )
