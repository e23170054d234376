"""The LightningModule: batches, loss, validation, optimizer and schedule of one language model."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn

from gptattn.data.run_data import RunData
from gptattn.data.sampler import Batch, Batches, TrainingStream, rows_of
from gptattn.errors import NumericError
from gptattn.machine.device import runs_ahead
from gptattn.model.gpt import GPT
from gptattn.model.loss import (
    IGNORED,
    drop_ignored,
    find_hits,
    linear_cross_entropy,
    logits_to_gradient,
)
from gptattn.optim.matrix_rule import CombinedAdamW, MatrixRule, split_by_decay
from gptattn.runs.metrics import ACCURACY, BITS, LOSS, SLICE, TRAIN_LOSS
from gptattn.settings.budget import learning_rate
from gptattn.settings.config import TrainConfig


class LanguageModel(L.LightningModule):
    """Trains a GPT on batches: ids, targets and, where they are kept apart, documents, [B, T] each.

    `schedule(step)` is the position on the learning-rate schedule, 0 to 1, of optimizer step `step`
    (counted from 1), so budgets in steps and in seconds follow the same curve. On a task, some
    targets are IGNORED, and the accuracy on the others is logged. `matrices`, if given, updates the
    layers' matrices in place of AdamW. `on_batch_made` gets the seconds that a step's batch took.
    `longer` shares the model's weights and reads rows beyond the trained length in validation.

    Raises NumericError if a loss or gradient is not finite: on a CPU before the update; on a GPU
    when `MetricRows` writes the step's row, since the host does not wait for it.

    With several processes, each gets its rows of every batch, and all agree on gradients and
    losses. A step equals that of one process with all rows, except for the order of sums and the
    dropout masks, which a process draws from (seed, step, rank).
    """

    def __init__(
        self,
        model: GPT,
        cfg: TrainConfig,
        data: RunData,
        schedule: Callable[[int], float],
        matrices: MatrixRule | None,
        on_batch_made: Callable[[float], None] = lambda seconds: None,
        longer: GPT | None = None,
    ) -> None:
        super().__init__()
        self.cfg, self.data, self.on_batch_made = cfg, data, on_batch_made
        self.model, self.optim, self.schedule = model, cfg.optim, schedule
        self.accumulate, self.loss_chunk_tokens = cfg.accumulate, cfg.loss_chunk_tokens
        self.val_bytes, self.matrices, self.seed = data.val_bytes, matrices, cfg.seed
        self.scaled_loss = cfg.trainer.precision == "16-mixed"  # by Lightning, for float16
        # Of this process's newest step: means over its micro-batches.
        self.losses: dict[str, Tensor] = {}
        self.grad_norm = torch.tensor(0.0)
        self.val_metrics: dict[str, float] = {}
        self._trained_length, lengths = cfg.model.context_length, cfg.validation.lengths
        self._longer = (longer or model,)  # in a tuple: a submodule would be saved and trained
        self._lengths = [n for n in lengths if n <= self._longer[0].context_length]
        self._trained = list(model.parameters())
        self._scored = 0  # targets of the newest batch of a task
        self._step_targets: dict[int, int] = {}  # of all processes' micro-batches, by step

    def train_dataloader(self) -> Iterable[Batch]:
        # A torch DataLoader would draw from the global generator and change the dropout masks.
        # global_step counts the steps taken, so a resumed run starts with its next step's batch.
        trainer, cfg = self.trainer, self.cfg
        rows = rows_of(cfg.batch_size, cfg.accumulate, trainer.global_rank, trainer.world_size)

        def batch(step: int) -> Batch:
            sizes = cfg.batch_size, cfg.model.context_length
            # Each process makes the whole batch, in milliseconds, and trains on its rows.
            whole = self.data.training_batch(cfg.seed, step, *sizes)
            if self.val_bytes is None:
                self._step_targets.pop(step - 2, None)  # the step before may still be running
                self._step_targets[step] = int((whole[1] != IGNORED).sum())
            return whole if trainer.world_size == 1 else tuple(part[rows] for part in whole)

        return TrainingStream(batch, trainer.global_step, self.on_batch_made, cfg.accumulate)

    def val_dataloader(self) -> Iterable[Batch]:
        rows, trained = self.cfg.batch_size // self.cfg.accumulate, self._trained_length
        own, others = self.data.validation(rows, trained), {*self._lengths} - {trained}
        more = [self.data.validation(max(1, rows * trained // n), n) for n in others]
        return Batches([*chain(own, *more)]) if more else own

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Pin the batch's memory, so that the host need not wait for a GPU to copy it."""
        if self.val_bytes is None:
            self._scored = int((batch[1] != IGNORED).sum())
        on_gpu = self.device.type == "cuda"
        return tuple(tensor.pin_memory() for tensor in batch) if on_gpu else batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, and the rule of the layers' matrices, if there is one. Decay is on matrices only.

        Source: Radford et al. 2018 (GPT), sec. 4.1.
        """
        decayed, others = split_by_decay(self._trained)
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        if self.matrices is not None:
            inner = self.model.layer_matrices()
            groups[0]["params"] = [p for p in decayed if p not in inner]
            by_rule = {"params": [p for p in decayed if p in inner], "by_rule": True}
            groups.append(by_rule)
        settings: dict[str, Any] = {
            "lr": self.optim.lr,
            "betas": (self.optim.beta1, self.optim.beta2),
            "eps": self.optim.eps,
            "weight_decay": self.optim.weight_decay,
            # In float16, a fused optimizer would unscale the gradients itself, after clipping; for
            # a plain one Lightning unscales them before.
            "fused": not self.scaled_loss,
        }
        if self.matrices is None:
            return torch.optim.AdamW(groups, **settings)
        return CombinedAdamW(groups, self.matrices, **settings)

    def on_fit_start(self) -> None:
        """On a GPU, compile what lies between the head's products; a CPU does not run it."""
        if self.cfg.compile and self.device.type == "cuda":
            self.model.to_gradient = torch.compile(logits_to_gradient, fullgraph=True)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Set the step's learning rate.

        With a budget in seconds, Lightning's schedulers would be a step late.
        """
        if batch_idx % self.accumulate:
            return
        step = self.global_step + 1
        rate = learning_rate(self.schedule(step), self.optim)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate
        if self.trainer.world_size > 1:
            key = (self.seed, step, self.trainer.global_rank)
            drawn = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
            torch.manual_seed(int(drawn >> np.uint64(1)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return a micro-batch's share of the step's loss, the mean over all targets of the step.

        Lightning divides it by the number of micro-batches. The layers' own losses are added: each
        trains only weights of its layer.
        """
        own: dict[str, list[Tensor]] = {}
        scored = self._scored if self.val_bytes is None else None
        loss = self.model.loss(
            *batch, chunk_tokens=self.loss_chunk_tokens, scored=scored, losses=own
        )
        parts = self.accumulate * self.trainer.world_size
        if scored is not None and parts > 1:
            # It is the mean over its own targets: weigh it by its share of the step's.
            loss = loss * (scored * parts / self._step_targets[self.global_step])
        losses = {TRAIN_LOSS: loss}
        for name, of_layers in own.items():
            by_layer = torch.stack(of_layers)
            losses[f"train/{name}"] = by_layer.mean()
            loss = loss + by_layer.sum()
        self._add_losses(losses, batch_idx)
        return loss

    def _add_losses(self, losses: dict[str, Tensor], batch_idx: int) -> None:
        """Add a micro-batch to the losses of its step; `self.log` would take half a millisecond."""
        if batch_idx % self.accumulate == 0:
            self.losses = {}
        for name, loss in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + loss.detach() / self.accumulate

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a metric; `MetricRows`, not Lightning, passes it to the loggers."""
        super().log(name, value, *args, **options | {"logger": False})

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip all gradients together to a norm of `optim.grad_clip`."""
        self.grad_norm = nn.utils.get_total_norm(
            [p.grad for p in self._trained if p.grad is not None]
        )
        late = runs_ahead(self.device)
        if not late:
            self.check_finite(self.global_step + 1, self.losses[TRAIN_LOSS], self.grad_norm)
        # Multiplying takes time even if nothing is clipped; a GPU's host does not wait to find out.
        if late or self.grad_norm > self.optim.grad_clip:
            nn.utils.clip_grads_with_norm_(self._trained, self.optim.grad_clip, self.grad_norm)

    def check_finite(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Raise NumericError if a step's loss or gradient is not finite."""
        values = {TRAIN_LOSS: loss}
        if not self.scaled_loss:  # with it, Lightning's scaler skips a step with such a gradient
            values["train/grad_norm"] = grad_norm
        for name, value in values.items():
            if not torch.isfinite(value):
                raise NumericError(
                    name,
                    f"is {value.item()} at step {step}; try a lower optim.lr or optim.grad_clip, "
                    "or trainer.precision=32-true",
                )

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Do nothing: Lightning calls it after the forward pass, which needs the memory sooner."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Take the step, then free the gradients."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def on_validation_epoch_start(self) -> None:
        self._val_nats, self._val_tokens = 0.0, 0
        names = [ACCURACY, *(f"{SLICE}{one}" for one in (*self._lengths, *self.data.slices))]
        zeros = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._val_hits = dict.fromkeys(names, zeros)  # of a task: how many are right, and scored
        if self._longer[0] is not self.model:
            self._longer[0].to(self.model.head.weight)  # moves what is not a weight

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the losses of this process's rows."""
        rows, rank, size = len(batch[0]), self.trainer.global_rank, self.trainer.world_size
        mine = slice(rows * rank // size, rows * (rank + 1) // size)
        if mine.start == mine.stop:
            return
        ids, targets, *more = (tensor[mine] for tensor in batch)  # labels, or documents of a text
        length, of_task = ids.shape[1], self.val_bytes is None
        model = self.model if length <= self._trained_length else self._longer[0]
        whole = (self.cfg.batch_size // self.accumulate // size, self._trained_length)
        eager = self.cfg.compile is True and ids.shape != whole  # else blocks compile once more
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            hidden = model.hidden(ids, None, more[0] if more and not of_task else None)
        head, chunk = self.model.head.weight, self.loss_chunk_tokens
        if of_task:
            count = self._scored if size == 1 else int((targets != IGNORED).sum())
            hidden, targets, *labels = drop_ignored(hidden, targets, count, *more)
            self._count(find_hits(hidden, head, targets, chunk), length, *labels)
            if length != self._trained_length:
                return
        loss = linear_cross_entropy(hidden, head, targets, chunk, self.model.to_gradient)
        self._val_nats = self._val_nats + loss.double() * targets.numel()  # stays on the device
        self._val_tokens += targets.numel()

    def _count(self, hits: Tensor, length: int, labels: Tensor | None = None) -> None:
        """Add the hits [n] of scored positions in rows of this length, and of their slices."""
        found = torch.stack([hits, torch.ones_like(hits)])
        of_slices = {f"{SLICE}{length}": found}
        if length == self._trained_length:
            of_slices[ACCURACY] = found
            for number, name in enumerate(self.data.slices):
                of_slices[f"{SLICE}{name}"] = found & (labels == number)
        for name in self._val_hits.keys() & of_slices.keys():
            self._val_hits[name] = self._val_hits[name] + of_slices[name].sum(1)

    def on_validation_epoch_end(self) -> None:
        sums = torch.tensor([float(self._val_nats), self._val_tokens], dtype=torch.float64)
        sums = torch.cat([sums.to(self.device), *self._val_hits.values()])
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        nats, tokens, *counts = sums.tolist()
        loss = nats / tokens
        if not math.isfinite(loss):
            raise NumericError(
                LOSS, f"is {loss} after step {self.global_step}; try a lower optim.lr"
            )
        self.val_metrics = {
            LOSS: loss,
            "val/perplexity": math.exp(min(loss, 700.0)),  # exp(710) overflows a float
        }
        for name, right, scored in zip(self._val_hits, counts[::2], counts[1::2], strict=True):
            if scored:
                self.val_metrics[name] = right / scored
        if self.val_bytes is not None:
            self.val_metrics[BITS] = nats / math.log(2) / self.val_bytes
        self.log_dict(self.val_metrics)  # for other callbacks; in float32

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # AdamW's fused step reads the memory of a parameter and its averages in one order, which a
        # file does not keep for a parameter that is not contiguous.
        groups = self.configure_optimizers().param_groups  # the trainer has no optimizer yet
        ordered = [p for group in groups for p in group["params"]]
        for states in checkpoint["optimizer_states"]:
            for number, state in states["state"].items():
                for name, value in state.items():
                    if value.shape == ordered[number].shape:
                        like = torch.empty_like(ordered[number], dtype=value.dtype, device="cpu")
                        state[name] = like.copy_(value)
