"""The LightningModule: loss, validation, optimizer and schedule of one language model."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from gptattn.data.sampler import Batch
from gptattn.errors import NumericError
from gptattn.machine.world import ALONE, World
from gptattn.model.decay import by_decay, layer_matrices
from gptattn.model.gpt import GPT
from gptattn.model.loss import IGNORED, hits, linear_cross_entropy, scored
from gptattn.optim.matrix_rule import CombinedAdamW, MatrixRule
from gptattn.settings.budget import learning_rate_factor
from gptattn.settings.config import OptimConfig
from gptattn.training.step_guard import DeviceGuard, HostGuard


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Return the value with the parameter's strides, which a file does not keep.

    AdamW's fused step walks over the memory of both in one order.
    """
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _seed_of(*numbers: int) -> int:
    """Return one seed for torch from several numbers; others give another one."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


class LanguageModel(L.LightningModule):
    """Trains a GPT on batches: ids, targets and, where they are kept apart, documents, [B, T] each.

    `progress(step)` is the position on the learning-rate schedule, 0 to 1, of optimizer step `step`
    (counted from 1), so budgets in steps and in seconds follow the same curve. `matrices` updates
    the layers' matrices in place of AdamW, if given. `val_bytes` are the UTF-8 bytes of the scored
    validation tokens; None: the data is a task, of whose targets some are IGNORED, and the share of
    the others that is predicted exactly is logged. `scaled_loss`: Lightning scales the loss, as for
    float16. Raises NumericError if a loss or gradient is not finite, before the optimizer step.
    With `on_device` the host may be a step ahead of the device: it raises one step late, and the
    weights are those before the bad step.

    The processes of `world` each get their rows of every batch, and agree on gradients and losses:
    a step is that of one process with all rows, but for the order of sums and the masks of dropout,
    which a process draws from (seed, step, its rank).
    """

    def __init__(
        self,
        model: GPT,
        optim: OptimConfig,
        progress: Callable[[int], float],
        *,
        accumulate: int,
        loss_chunk_tokens: int | None,
        val_bytes: int | None,
        scaled_loss: bool = False,
        matrices: MatrixRule | None = None,
        on_device: bool = False,
        world: World = ALONE,
        seed: int = 0,
    ) -> None:
        super().__init__()
        # A batch is a whole optimizer step. Splitting it into micro-batches here costs less than
        # Lightning's closures, and frees the gradients before the next forward needs the memory.
        self.automatic_optimization = False
        self.model, self.optim, self.progress = model, optim, progress
        self.accumulate, self.loss_chunk_tokens = accumulate, loss_chunk_tokens
        self.val_bytes, self.scaled_loss, self.matrices = val_bytes, scaled_loss, matrices
        self.world, self.seed = world, seed
        # Only AdamW's own kernel can leave out an update that the host has not seen to be bad.
        late = on_device and not scaled_loss and matrices is None
        self._guard = DeviceGuard() if late else HostGuard(scaled_loss)
        self.train_losses: list[Tensor] = []  # since the last row; MetricRows empties it
        self.grad_norm = torch.tensor(0.0)
        self.lr = 0.0
        self.val_metrics: dict[str, float] = {}
        # Lightning replays the newest step of a resumed run.
        self.skip_replayed_step = False
        self._val_nats, self._val_tokens, self._val_hits = 0.0, 0, 0
        self._trained = list(model.parameters())

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One optimizer step: its micro-batches in order, then the update."""
        if self.skip_replayed_step:
            self.skip_replayed_step = False
            steps = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            steps.increment_ready()
            steps.increment_completed()
            return
        loss = self._gradients(batch) if self.world.size == 1 else self._shared_gradients(batch)
        self.train_losses.append(loss)
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self.lr = self.learning_rate()
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        optimizer.step()
        optimizer.zero_grad()

    def _gradients(self, batch: Batch) -> Tensor:
        """Add the gradients of all micro-batches; return the mean loss."""
        losses = []
        for part in self._micro_batches(batch):
            loss = self._loss(part)
            loss = loss / self.accumulate
            self._guard.see_loss(self.global_step + 1, loss)
            if self.scaled_loss:
                self.manual_backward(loss)
            else:  # manual_backward would also call Lightning's hooks, which are not used here
                loss.backward()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def _shared_gradients(self, batch: Batch) -> Tensor:
        """As `_gradients`, of all processes' rows; they exchange gradients once, in the last pass.

        No process may end before that, or the others would wait: the loss is looked at after it.
        """
        torch.manual_seed(_seed_of(self.seed, self.global_step + 1, self.world.place.rank))
        total, shares = torch.zeros((), device=self.device), self._shares(batch[1])
        strategy = self.trainer.strategy
        assert isinstance(strategy, DDPStrategy)
        for i, part in enumerate(self._micro_batches(batch)):
            loss = self._loss(part)
            loss = loss * (shares[i] / self.accumulate)
            last = i == self.accumulate - 1
            with contextlib.nullcontext() if last else strategy.block_backward_sync():
                self.manual_backward(loss)
            total = total + loss.detach()
        total = self.world.mean(total)
        self._guard.see_loss(self.global_step + 1, total)
        return total

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        rows = len(batch[0]) // self.accumulate
        return zip(*(tensor.split(rows) for tensor in batch), strict=True)

    def _loss(self, part: Batch) -> Tensor:
        chunk, ignoring = self.loss_chunk_tokens, self.val_bytes is None
        return self.model.loss(*part, chunk_tokens=chunk, ignoring=ignoring)

    def _shares(self, targets: Tensor) -> Tensor:
        """Return what each micro-batch's loss counts here, where 1 is an even share of its targets.

        A process's loss is the mean over its own scored targets, which may be more than another's.
        """
        if self.val_bytes is not None:
            return torch.ones(self.accumulate, device=targets.device)
        counts = (targets.unflatten(0, (self.accumulate, -1)) != IGNORED).sum((1, 2))
        return counts * self.world.size / self.world.sum(counts)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.settle()
        # Lightning identifies parameters by number; the file uses their names.
        order = self._optimizer_order()
        # A run of no steps has no optimizer.
        states = [state["state"] for state in checkpoint.pop("optimizer_states")]
        checkpoint["optimizer"] = {order[i]: one for state in states for i, one in state.items()}
        checkpoint["weights"] = self.model.state_dict()
        del checkpoint["state_dict"]
        checkpoint["since_row"] = {
            "train_losses": list(self.train_losses),
            "grad_norm": self.grad_norm,
            "lr": self.lr,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights, optimizer = checkpoint.pop("weights"), checkpoint.pop("optimizer")
        checkpoint["state_dict"] = {f"model.{name}": weight for name, weight in weights.items()}
        parameters = dict(self.model.named_parameters())
        state = {
            i: {k: _laid_out_as(parameters[name], v) for k, v in optimizer[name].items()}
            for i, name in enumerate(self._optimizer_order())
            if name in optimizer
        }
        # The optimizer's hyperparameters come from the settings, not from the file.
        groups = self.configure_optimizers().state_dict()["param_groups"]
        checkpoint["optimizer_states"] = [{"state": state, "param_groups": groups}]
        state = checkpoint["since_row"]
        self.train_losses[:] = state["train_losses"]
        self.grad_norm, self.lr = state["grad_norm"], state["lr"]

    def on_train_start(self) -> None:
        # A resumed run reads them into the host's memory, wherever the model is.
        self.train_losses[:] = [loss.to(self.device) for loss in self.train_losses]
        self.grad_norm = self.grad_norm.to(self.device)

    def _optimizer_order(self) -> list[str]:
        """The names of the parameters, as the optimizer numbers them."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [names[parameter] for group in self._groups() for parameter in group["params"]]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self._trained if p.grad is not None]
        self.grad_norm = nn.utils.get_total_norm(gradients)
        self._guard.clip(
            self.global_step + 1, self.grad_norm, self.optim.grad_clip, self._trained, optimizer
        )

    def settle(self) -> None:
        """Raise NumericError if a step so far was not finite and has not been reported."""
        self._guard.settle()

    def learning_rate(self) -> float:
        """Return the learning rate of the step in progress."""
        progress = self.progress(self.global_step + 1)
        return self.optim.lr * learning_rate_factor(progress, self.optim)

    def on_validation_epoch_start(self) -> None:
        self.settle()
        self._val_nats, self._val_tokens, self._val_hits = 0.0, 0, 0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        mine = self.world.part(len(batch[0]))
        if mine.start < mine.stop:
            ids, targets, *documents = (tensor[mine] for tensor in batch)
            self.add_validation(self.model.hidden(ids, None, *documents), targets)

    def add_validation(self, hidden: Tensor, targets: Tensor) -> None:
        """Add a validation batch: what the head takes [B, T, d_model], and the targets [B, T]."""
        head, chunk = self.model.head.weight, self.loss_chunk_tokens
        if self.val_bytes is None:
            hidden, targets = scored(hidden, targets)
            self._val_hits += int(hits(hidden, head, targets, chunk))
        loss = linear_cross_entropy(hidden, head, targets, chunk)
        self._val_nats += loss.item() * targets.numel()
        self._val_tokens += targets.numel()

    def on_validation_epoch_end(self) -> None:
        nats, tokens, hits = self.world.total(self._val_nats, self._val_tokens, self._val_hits)
        self._val_nats, self._val_tokens, self._val_hits = nats, int(tokens), int(hits)
        loss = self._val_nats / self._val_tokens
        if not math.isfinite(loss):
            raise NumericError(
                "val/loss",
                f"is {loss} after step {self.global_step}; try a lower optim.lr",
            )
        if self.val_bytes is None:
            figure = {"val/accuracy": self._val_hits / self._val_tokens}
        else:
            figure = {"val/bits_per_byte": self._val_nats / math.log(2) / self.val_bytes}
        self.val_metrics = {
            "val/loss": loss,
            "val/perplexity": math.exp(min(loss, 700.0)),  # exp(710) overflows a float
            **figure,
        }

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: decay on matrices only.

        Source: Radford et al. 2018 (GPT), sec. 4.1.
        """
        decayed, others = by_decay(self._trained)
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        if self.matrices is None:
            return groups
        inner = layer_matrices(self.model)
        groups[0]["params"] = [p for p in decayed if p not in inner]
        return [*groups, {"params": [p for p in decayed if p in inner], "by_rule": True}]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, and the rule of the layers' matrices, if there is one."""
        settings: dict[str, Any] = {
            "lr": self.optim.lr,
            "betas": (self.optim.beta1, self.optim.beta2),
            "eps": self.optim.eps,
            "weight_decay": self.optim.weight_decay,
            # For float16, Lightning leaves it to a fused optimizer to unscale the gradients, which
            # is after clipping; for a plain one it unscales them before.
            "fused": not self.scaled_loss,
        }
        if self.matrices is None:
            return torch.optim.AdamW(self._groups(), **settings)
        return CombinedAdamW(self._groups(), self.matrices, **settings)
