"""Callbacks of a run: the step clock, the rows of metrics, samples, and the end of the budget."""

import math
import re
import sys
from array import array
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from numpy.typing import NDArray

from gptattn.data.run_data import RunData
from gptattn.data.tokenizer import encode_prompt
from gptattn.decode.generate import generate
from gptattn.decode.sampling import Sampling
from gptattn.machine.device import peak_memory_mb, whole_peak_memory_mb
from gptattn.settings.budget import Budget
from gptattn.settings.config import SampleConfig
from gptattn.training.module import LanguageModel
from gptattn.training.recorder import RunRecorder
from gptattn.training.timers import HostTimer, StepTimer

PROMPT_TOKENS = 16  # of the default prompt, if the held-out text has no words
OPENING_TOKENS = 200  # of the held-out text, to search for the words of the default prompt
COMPARED_STEPS = 20  # in each of the two medians of `StepClock.slowdown`


class StepClock(L.Callback):
    """Measures training time: making a batch, then all up to the end of its optimizer step.

    Validation, samples, logging and checkpoints do not count. With `compiled`, `seconds` leaves out
    the first step, most of which is compilation. A `timer` may know a step's seconds late:
    `settle` waits for them. `shared` returns the seconds that all processes of the run go by, given
    those of this one. Must be the first of the callbacks.
    """

    def __init__(
        self,
        compiled: bool = False,
        timer: StepTimer | None = None,
        shared: Callable[[float], float] = lambda seconds: seconds,
    ) -> None:
        self._compiling = compiled
        self._timer = HostTimer() if timer is None else timer
        self._shared = shared
        self.seconds = 0.0  # of training, in all
        self.step_seconds = array("d")  # of each optimizer step
        self._making = 0.0  # seconds of making the next step's batch
        self._ended = 0  # steps, of which the newest may not be in `step_seconds` yet

    def add(self, seconds: float) -> None:
        """Add the time spent on making a batch."""
        self._making += seconds

    def on_train_batch_start(self, *args: Any) -> None:
        self._timer.begin()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step > self._ended:
            self._ended += 1
            self._keep(self._timer.end(self._making))
        else:  # a resumed run replays its newest step
            self.settle()
        self._making = 0.0

    def on_validation_start(self, *args: Any) -> None:
        self.settle()

    def settle(self) -> None:
        """Complete `seconds` and `step_seconds`; no time counts from now to the next batch."""
        self._keep(self._timer.settle())

    def _keep(self, seconds: list[float]) -> None:
        for one in seconds:
            self.step_seconds.append(one)
            if not self._compiling:
                self.seconds += one
            self._compiling = False
        if seconds:
            self.seconds = self._shared(self.seconds)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        steps = torch.tensor(self.step_seconds, dtype=torch.float64)
        return {"seconds": self.seconds, "step_seconds": steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = state_dict["seconds"]
        self.step_seconds = array("d", state_dict["step_seconds"].tolist())
        self._ended = len(self.step_seconds)

    def median_step_seconds(self) -> float:
        """Return the median over all steps, which compilation and other load hardly affect."""
        return median(self.step_seconds)

    def slowdown(self) -> float:
        """Return the newest steps' median time over that of the first ones; 1 with too few."""
        first = self.step_seconds[1 : 1 + COMPARED_STEPS]  # the very first step is a warm-up
        newest = self.step_seconds[1 + COMPARED_STEPS :][-COMPARED_STEPS:]
        return median(newest) / median(first) if len(newest) == COMPARED_STEPS else 1.0


def memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory in MB (10^6 bytes): since the process began, and of training alone."""
    return {
        "perf/peak_memory_mb": whole_peak_memory_mb(device),
        "perf/peak_memory_training_mb": peak_memory_mb(device),
    }


class MetricRows(L.Callback):
    """Records one row every `log_every` optimizer steps and one per validation."""

    def __init__(
        self,
        recorder: RunRecorder,
        clock: StepClock,
        *,
        log_every: int,
        tokens_per_step: int,
        flops_per_token: float,
        budget: Budget,
        budget_settings: dict[str, Any],
        device_flops_per_second: float | None,
        own_memory: bool = True,
    ) -> None:
        """`budget_settings` is the budget section of the settings.

        `device_flops_per_second` None: other runs share the machine, so the speed is not the run's
        own. `own_memory`: the memory of the process is, since they do not share the model.
        """
        self.recorder, self.clock, self.log_every = recorder, clock, log_every
        self.tokens_per_step, self.flops_per_token = tokens_per_step, flops_per_token
        self.budget, self.budget_settings = budget, budget_settings
        self.device_flops_per_second = device_flops_per_second
        self.own_speed, self.own_memory = device_flops_per_second is not None, own_memory
        self.last: dict[str, float | None] = {}  # the newest value of every metric
        # Every budget that the run has completed; None if an older version's checkpoint lacks it.
        self.completed: list[dict[str, Any]] | None = []
        self._warned_of_mfu = False
        self._logged_step = 0
        self._timed_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": self.recorder.rows,
            "last": dict(self.last),
            "completed": self.completed,
            "logged_step": self._logged_step,
            "timed_steps": self._timed_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last = dict(state_dict["last"])
        # What shared the machine or its model before it was resumed has no own figures either.
        self.own_speed &= self.last.get("perf/tokens_per_s", 0.0) is not None
        self.own_memory &= self.last.get("perf/peak_memory_mb", 0.0) is not None
        self.completed = state_dict.get("completed")
        self._logged_step = state_dict["logged_step"]
        self._timed_steps = state_dict["timed_steps"]

    def throughput(self, step_seconds: float) -> dict[str, float | None]:
        """Return tokens/s, ms per step and MFU. An MFU above 1 becomes None, with one warning."""
        if not self.own_speed or self.device_flops_per_second is None:
            return dict.fromkeys(("perf/tokens_per_s", "perf/step_ms", "perf/mfu"))
        tokens_per_s = self.tokens_per_step / step_seconds
        mfu = tokens_per_s * self.flops_per_token / self.device_flops_per_second
        if mfu > 1 and not self._warned_of_mfu:
            print(
                f"warning: perf/mfu: is {mfu:.3g}, above 1, since the machine was busy when its "
                "rate was measured; recorded as null",
                file=sys.stderr,
            )
            self._warned_of_mfu = True
        return {
            "perf/tokens_per_s": tokens_per_s,
            "perf/step_ms": 1e3 * step_seconds,
            "perf/mfu": mfu if mfu <= 1 else None,
        }

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        if step > self._logged_step and (step % self.log_every == 0 or step == 1):
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # The training loss shown beside the validation loss must include the newest step.
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step > self._logged_step:
            self._log(trainer, pl_module)

    def _log(self, trainer: L.Trainer, module: LanguageModel) -> None:
        step = trainer.global_step
        module.settle()
        self.clock.settle()
        per_step = mean(self.clock.step_seconds[self._timed_steps :])
        # Infinite where float16 overflowed and the loss scaler skipped the step.
        grad_norm = module.grad_norm.item()
        row = {
            "train/loss": torch.stack(module.train_losses).mean().item(),
            "train/lr": module.lr,
            "train/grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            **self.throughput(per_step),
            **self._memory(module),
            **self._progress(step),
        }
        module.train_losses.clear()
        self._logged_step, self._timed_steps = step, len(self.clock.step_seconds)
        self.last |= row
        self.recorder.log_metrics(row, step)

    def _memory(self, module: LanguageModel) -> dict[str, float | None]:
        found = memory(module.device)
        return {name: value if self.own_memory else None for name, value in found.items()}

    def _progress(self, step: int) -> dict[str, float]:
        tokens = step * self.tokens_per_step
        return {
            "progress/tokens": tokens,
            "progress/seconds": self.clock.seconds,
            "progress/flops": tokens * self.flops_per_token,
            "progress/budget": self.budget.progress(step, self.clock.seconds),
        }

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        row = {**pl_module.val_metrics, **self._progress(step)}
        self.last |= row
        self.recorder.log_metrics(row, step)
        if self.completed is not None and row["progress/budget"] >= 1.0:
            # Must precede this validation's checkpoint: a resume with a larger budget reads it.
            end = {
                "budget": self.budget_settings,
                "step": step,
                "metrics": self.last | self.final(pl_module),
            }
            self.completed = [*(c for c in self.completed if c["step"] < step), end]

    def final(self, module: LanguageModel) -> dict[str, float | None]:
        """Return the final speed, from the median over all steps if there are any, and memory."""
        steps = len(self.clock.step_seconds)
        speed = self.throughput(self.clock.median_step_seconds()) if steps else {}
        return speed | self._memory(module)


class Samples(L.Callback):
    """Generates text at each validation and records it; always with the same seed."""

    def __init__(self, recorder: RunRecorder, data: RunData, cfg: SampleConfig, seed: int) -> None:
        self.recorder, self.tokenizer, self.cfg, self.seed = recorder, data.tokenizer, cfg, seed
        self.prompt = _prompt(data, cfg.prompt) if cfg.tokens else np.empty(0, np.uint16)
        self.text = ""

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.cfg.tokens == 0:
            return
        ids = torch.from_numpy(self.prompt.astype("int64")).unsqueeze(0).to(pl_module.device)
        generator = torch.Generator(device=ids.device).manual_seed(self.seed)
        out = generate(
            pl_module.model,
            ids,
            self.cfg.tokens,
            Sampling(temperature=self.cfg.temperature, top_k=self.cfg.top_k),
            vocab_size=self.tokenizer.vocab_size,
            generator=generator,
        )
        self.text = self.tokenizer.decode(out[0].cpu().numpy())
        self.recorder.log_text("sample/text", self.text, trainer.global_step)


def _prompt(data: RunData, given: str | None) -> NDArray[np.uint16]:
    if given is not None:
        return encode_prompt(data.tokenizer, given)
    return opening(data)


def opening(data: RunData) -> NDArray[np.uint16]:
    """Return the ids of the first whole words of the held-out text, at most three.

    If there are none, the first `PROMPT_TOKENS` tokens.
    """
    ids = data.opening_rows(OPENING_TOKENS, OPENING_TOKENS)[0].numpy()
    text = data.tokenizer.decode(ids)
    words = re.search(r"(?<=\s)[^\s\ufffd]+(\s[^\s\ufffd]+){0,2}(?=\s)", text)
    if words is None:
        return ids[:PROMPT_TOKENS].astype(np.uint16)
    return encode_prompt(data.tokenizer, words.group())


class BudgetEnd(L.Callback):
    """Stops the run when a budget in seconds is used up; the Trainer itself counts the steps."""

    def __init__(self, budget: Budget, clock: StepClock) -> None:
        self.budget, self.clock = budget, clock

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.budget.progress(trainer.global_step, self.clock.seconds) >= 1.0:
            trainer.should_stop = True


class SharedValidations(L.Callback):
    """Lets all processes of a run validate after the same steps, `seconds` of training apart.

    Lightning itself would ask the clock of each process. It validates after every step for as long
    as `val_check_batch` is 1.
    """

    def __init__(self, seconds: float, clock: StepClock) -> None:
        self.seconds, self.clock = seconds, clock
        self._newest = 0.0  # when the newest validation was due

    def on_train_start(self, *args: Any) -> None:
        self._newest = self.clock.seconds

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.val_check_batch = math.inf
        if self.clock.seconds - self._newest >= self.seconds:
            trainer.val_check_batch, self._newest = 1, self.clock.seconds
