"""On a GPU the host waits only where a row of metrics is due, and then for the row before it."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from fakecuda import Counts, count_on_cuda
from support import tiny

from gptattn.build.model import build_model
from gptattn.machine.console import make_console, quiet_lightning
from gptattn.runs.folder import RunFolder
from gptattn.settings.compose import settings
from gptattn.training.callbacks import BudgetEnd, StepClock
from gptattn.training.module import LanguageModel
from gptattn.training.preflight import preflight
from gptattn.training.run import _make_trainer

STEPS = 4  # with a row after steps 1, 2 and 4


class Enough(Exception):
    """Ends the run."""


class Watch(L.Callback):
    """Keeps what the host waited for, by step, the batch's copy included."""

    def __init__(self, waits: list[str]) -> None:
        self.waits, self.by_step = waits, {}  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.by_step.setdefault(max(1, trainer.global_step), []).extend(self.waits)
        self.waits.clear()
        if trainer.global_step == STEPS:
            raise Enough


def waits_by_step(folder: Path, *overrides: str) -> dict[int, list[str]]:
    """Train on a fake GPU; return what the host waited for in each step."""
    prepared = preflight(settings(tiny(folder, "log_every=2", "budget.steps=9", *overrides)))

    def program(counts: Counts) -> dict[int, list[str]]:
        class Event:
            """Has the number of the step after which it was recorded."""

            def __init__(self, enable_timing: bool) -> None:
                self.step = trainer.global_step

            def record(self) -> None: ...

            def synchronize(self) -> None:
                counts.waits.append(f"step {self.step}")

            def elapsed_time(self, other: Any) -> float:
                return 1.0

        answers = {
            "is_available": True,
            "device_count": 1,
            "get_device_capability": (7, 0),
            "set_device": None,
            "empty_cache": None,
            "is_current_stream_capturing": False,
            "max_memory_allocated": 0,
        }
        with ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(
                    mock.patch(f"torch.cuda.{name}", mock.Mock(return_value=answer))
                )
            stack.enter_context(mock.patch("torch.cuda.Event", Event))
            stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda own: own))
            with torch.device("cuda"):
                model = build_model(prepared.cfg, prepared.data.tokenizer.vocab_size)
            # It is there, and fake tensors cannot be moved.
            stack.enter_context(mock.patch.object(model, "_apply", return_value=model))
            quiet_lightning()
            on_gpu = replace(prepared, device=torch.device("cuda"), model=model)
            clock, watch = StepClock(on_gpu), Watch(counts.waits)
            end, run = BudgetEnd(on_gpu, clock), RunFolder(folder / "run")
            trainer = _make_trainer(on_gpu, run, make_console(), clock, end, [])
            trainer.callbacks.append(watch)  # type: ignore[attr-defined]
            trainer.limit_val_batches = 0
            own = LanguageModel(
                model, prepared.cfg, prepared.data, lambda step: 0.5, prepared.matrices
            )
            with pytest.raises(Enough):
                trainer.fit(own)
        return watch.by_step

    return count_on_cuda(program)


@pytest.mark.parametrize(
    "own",
    [
        ["accumulate=2", "optim=muon", "trainer.precision=bf16-mixed"],
        pytest.param(
            ["attn=dsa", "data=stdlib", "data.mask_documents=true"], marks=pytest.mark.slow
        ),
        pytest.param(["attn=kda", "position=none", "model.dropout=0.1"], marks=pytest.mark.slow),
    ],
)
def test_the_host_waits_for_no_step_but_that_of_the_row_before(own, tmp_path):
    expected = {step: [] for step in range(1, STEPS + 1)} | {2: ["step 1"], 4: ["step 2"]}
    assert waits_by_step(tmp_path, *own) == expected


def test_a_validation_does_not_wait_for_each_batch(tmp_path):
    prepared = preflight(settings(tiny(tmp_path)))

    def validate(counts: Counts) -> list[str]:
        with torch.device("cuda"):
            model = build_model(prepared.cfg, prepared.data.tokenizer.vocab_size)
            batch = torch.zeros(2, 4, 16, dtype=torch.int64).unbind()
        own = LanguageModel(model, prepared.cfg, prepared.data, lambda step: 0.5, prepared.matrices)
        own.trainer = SimpleNamespace(world_size=1, global_rank=0)
        own.on_validation_epoch_start()
        counts.waits.clear()
        for number in range(2):
            own.validation_step(batch, number)
        return counts.waits

    assert count_on_cuda(validate) == []
