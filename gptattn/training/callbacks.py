"""Callbacks of a run: the step clock, rows of metrics, samples, and the budget's end.

Ctrl-C and other signals are handled in `checkpoints.py`, which saves the state.
"""

import contextlib
import math
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, distributed

from gptattn.data.tokenizer import encode_prompt
from gptattn.decode.generate import generate_text
from gptattn.decode.sampling import Sampling
from gptattn.errors import NumericError
from gptattn.machine.device import Moment, peak_memory_mb, runs_ahead
from gptattn.runs.metrics import MEMORY, SPEED, STEP_MS, TRAIN_LOSS, lowest_accuracy
from gptattn.training.compiling import uses_backend
from gptattn.training.module import LanguageModel
from gptattn.training.preflight import PreparedRun
from gptattn.training.record import MetricsFile, RunTensorBoard, log_row

PROMPT_TOKENS = 16  # of the held-out text's beginning, the default prompt


class StepClock(L.Callback):
    """Measures training time: from making a batch to the end of its optimizer step.

    Validation, samples, logging and checkpoints do not count. With `compile`, the seconds in the
    run's state leave out the first step, which is mostly compilation. On a GPU the host runs ahead,
    so the steps between two calls of `time_steps` share the GPU's time between them equally. Must
    be the first of the callbacks.
    """

    def __init__(self, prepared: PreparedRun) -> None:
        self._state, self._device = prepared.state, prepared.device
        self._compiling = prepared.cfg.compile is True or uses_backend(prepared.cfg, "flex")
        self._making = 0.0  # seconds spent on the first batch of the steps that are not timed yet
        self._start: Moment | None = None  # of these steps
        self._ended, self._steps = prepared.state.step, 0  # the newest step, and their number
        # At most one stretch of steps before these: start, end, number, and what to call then.
        self._pending: list[tuple[Moment | None, Moment, int, Callable[[], None]]] = []
        self._zero = 0.0  # when training would have begun without pauses, by the host's clock

    def add(self, seconds: float) -> None:
        """Add the time spent making a batch, unless a step is already being timed."""
        if self._start is None:
            self._making += seconds

    def on_train_batch_start(self, *args: Any) -> None:
        if self._start is None:
            self._start = Moment(self._device)
            self._zero = time.perf_counter() - self._making - self._state.seconds

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self._ended:
            return  # a micro-batch
        self._ended, self._steps = trainer.global_step, self._steps + 1
        if self._compiling or not runs_ahead(self._device):
            self.settle()

    def on_validation_start(self, *args: Any) -> None:
        self.settle()

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.world_size == 1:  # a GPU may wait forever for others that are gone
            with contextlib.suppress(Exception):  # only the error that ends the run counts
                self._complete()

    def time_steps(self, then: Callable[[], None]) -> None:
        """Call `then` once the steps since the last call are timed; on a GPU, at the next call."""
        self._complete()
        end = Moment(self._device)
        self._pending.append((self._start, end, self._steps, then))
        self._start, self._steps = self._start and end, 0
        if not runs_ahead(self._device):
            self._complete()

    def settle(self) -> None:
        """Time all steps so far, and pause until the next batch."""
        self.time_steps(lambda: None)
        self._complete()
        self._start = None

    def _complete(self) -> None:
        while self._pending:
            start, end, steps, then = self._pending.pop()
            seconds = end.seconds_since(start or end)  # also waits for what `then` reads
            if steps:
                taken, self._making = (seconds + self._making) / steps, 0.0
                for _ in range(steps):
                    self._state.step_seconds.append(taken)
                    self._state.seconds += 0.0 if self._compiling else taken
                    self._compiling = False
            then()

    def now(self) -> float:
        """Return the seconds of training so far, including steps that are not timed yet."""
        return self._state.seconds if self._start is None else time.perf_counter() - self._zero


class MetricRows(L.Callback):
    """Records one row every `log_every` optimizer steps and one per validation.

    A row has the module's losses, speed and progress, and what earlier callbacks logged with
    `self.log`: in training, means since the last row; in validation, values.
    """

    def __init__(self, prepared: PreparedRun, clock: StepClock) -> None:
        self.state, self.clock = prepared.state, clock
        self.cfg, self.budget = prepared.cfg, prepared.budget
        self.tokens_per_step = self.cfg.batch_size * self.cfg.model.context_length
        self.flops_per_token = prepared.cost.flops_per_token
        self.state.shared |= self.cfg.sweep.beside_others
        self._read_before: dict[str, Tensor] = {}  # Lightning's metrics at the last reading

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.state.complete = False  # the budget is larger now
        for name, values in self.state.since_row.items():
            self.state.since_row[name] = [value.to(pl_module.device) for value in values]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, ends = trainer.global_step, (batch_idx + 1) % self.cfg.accumulate == 0
        # The module's metrics win over others of the same name.
        new = self._read_new(trainer) | (pl_module.losses if ends else {})
        for name, value in new.items():
            self.state.since_row.setdefault(name, []).append(value)
        if ends and (step % self.cfg.log_every == 0 or step == 1):
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # The training loss shown next to the validation loss must include the newest step.
        if trainer.global_step > self.state.logged_step:
            self._log(trainer, pl_module)
            self.clock.settle()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: Any) -> None:
        self._share(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        steps = self.state.step_seconds
        row = self._speed_row(median(steps)) if steps else {}
        self._record(trainer, row | {MEMORY: peak_memory_mb(pl_module.device)}, trainer.global_step)

    def _read_new(self, trainer: L.Trainer) -> dict[str, Tensor]:
        """Return what was logged since the last call: Lightning also keeps old values."""
        before, self._read_before = self._read_before, dict(trainer.callback_metrics)
        return {
            name: value
            for name, value in self._read_before.items()
            if name != "epoch" and not (name in before and value.is_set_to(before[name]))
        }

    def _log(self, trainer: L.Trainer, module: LanguageModel) -> None:
        self._share(trainer, module)
        since, self.state.since_row = self.state.since_row, {}
        step = self.state.logged_step = trainer.global_step
        means = [torch.stack(values).mean() for values in since.values()]
        values = [one.double() for one in (since[TRAIN_LOSS][-1], module.grad_norm, *means)]
        copied = torch.stack(values).to("cpu", non_blocking=True)  # to pinned memory, in one copy
        rate: float = trainer.optimizers[0].param_groups[0]["lr"]
        memory = peak_memory_mb(module.device)

        def write() -> None:
            loss, grad_norm, *means = copied
            module.check_finite(step, loss, grad_norm)
            row = {
                **dict(zip(since, map(read, means), strict=True)),
                "train/lr": rate,
                # Infinite where float16 overflowed and the loss scaler skipped the step.
                "train/grad_norm": read(grad_norm),
                **self._speed_row(mean(self.state.step_seconds[self.state.timed_steps :])),
                MEMORY: memory,
                **self._progress_row(step),
            }
            self.state.timed_steps = len(self.state.step_seconds)
            self._record(trainer, row, step)

        self.clock.time_steps(write)

    def _share(self, trainer: L.Trainer, module: LanguageModel) -> None:
        """Average the losses since the last row over all processes; doing so again is harmless."""
        shared = [] if trainer.world_size == 1 else [*module.losses]
        for name in filter(self.state.since_row.get, shared):
            total = torch.stack(self.state.since_row[name]).double()
            distributed.all_reduce(total)
            means = (total / trainer.world_size).to(module.losses[name].dtype)
            self.state.since_row[name] = [*means]

    def _record(self, trainer: L.Trainer, row: dict[str, Any], step: int) -> None:
        self.state.last |= row
        log_row(trainer.loggers, row, step)

    def _speed_row(self, step_seconds: float) -> dict[str, float]:
        return {SPEED: self.tokens_per_step / step_seconds, STEP_MS: 1e3 * step_seconds}

    def _progress_row(self, step: int) -> dict[str, float]:
        tokens = step * self.tokens_per_step
        return {
            "progress/tokens": tokens,
            "progress/seconds": self.state.seconds,
            "progress/flops": tokens * self.flops_per_token,
            "progress/budget": self.budget.progress(step, self.state.seconds),
        }

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        logged = {name: read(value) for name, value in self._read_new(trainer).items()}
        row = {**logged, **pl_module.val_metrics, **self._progress_row(step)}
        self._record(trainer, row, step)
        reached = self.cfg.budget.reached(lowest_accuracy(row))
        self.state.complete = row["progress/budget"] >= 1.0 or reached


def read(value: Tensor) -> float | None:
    """Return a metric's value; None if it is not finite, which JSON cannot hold."""
    number = value.item()
    return number if math.isfinite(number) else None


class Samples(L.Callback):
    """Generates text at each validation, always with the same seed, and records it.

    It stops early once `stop` returns True.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        record: MetricsFile,
        board: RunTensorBoard,
        stop: Callable[[], bool],
    ) -> None:
        self.record, self.board, self.stop = record, board, stop
        self.cfg, self.seed = prepared.cfg.sample, prepared.cfg.seed
        self.tokenizer = prepared.data.tokenizer
        if self.cfg.tokens and self.cfg.prompt is None:
            self.prompt = prepared.data.opening(PROMPT_TOKENS, PROMPT_TOKENS)[0][0].numpy()
        elif self.cfg.tokens:
            self.prompt = encode_prompt(self.tokenizer, str(self.cfg.prompt))
        self.text = ""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        sampling = Sampling(temperature=self.cfg.temperature, top_k=self.cfg.top_k)
        arguments = self.prompt, self.cfg.tokens, sampling, self.seed
        with contextlib.suppress(NumericError):  # the loss comes next; its error names settings
            self.text = generate_text(pl_module.model, self.tokenizer, *arguments, self.stop)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.board.log_text("sample/text", self.text, trainer.global_step)
        self.record.log_metrics({"sample/text": self.text}, trainer.global_step)


class BudgetEnd(L.Callback):
    """Stops the run after a validation once its budget is used up or its `accuracy` is reached.

    Lightning's `max_steps` would skip the end of training, and its row, for a run that was killed
    between its last checkpoint and its summary.

    With a budget in seconds, it also decides when to validate: `validations` times, evenly spaced
    in training time. (Lightning's own interval in seconds uses each process's wall clock.) With
    several processes, the first one's clock counts, so that all take the same steps.
    """

    def __init__(self, prepared: PreparedRun, clock: StepClock) -> None:
        self.state, self.budget, self.clock = prepared.state, prepared.budget, clock
        self.validations, self.requested = prepared.cfg.validation.count, prepared.cfg.budget
        self.seconds = 0.0  # of training so far, the same in all processes
        self._step, self._validated = -1, 0

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._validated = int(self._progress(trainer) * self.validations)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        timed = self.budget.seconds is not None
        if timed:
            trainer.val_check_batch = math.inf
        if trainer.global_step == self._step:
            return  # a micro-batch
        due = int(self._progress(trainer) * self.validations)
        if timed and due > self._validated:
            trainer.val_check_batch, self._validated = 1, due

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.should_stop |= self.requested.reached(lowest_accuracy(pl_module.val_metrics))

    def _progress(self, trainer: L.Trainer) -> float:
        """Return the share of the budget that is used; ask the trainer to stop at its end."""
        self._step, self.seconds = trainer.global_step, self.clock.now()
        if self.budget.seconds is not None and trainer.world_size > 1:
            self.seconds = trainer.strategy.broadcast(self.seconds)
        progress = self.budget.progress(self._step, self.seconds)
        reached = self.requested.reached(lowest_accuracy(self.state.last))
        trainer.should_stop |= progress >= 1.0 or reached
        return progress
