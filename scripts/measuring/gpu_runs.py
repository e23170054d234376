"""The GPU's parts `loop` and `resume`: whole runs by Lightning, with all that belongs to them."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gptattn.errors import NumericError
from gptattn.machine.signals import Stopped
from gptattn.runs.checkpoint import read_checkpoint, weights_of
from gptattn.runs.folder import RunFolder
from gptattn.settings.config import TrainConfig
from gptattn.training.module import LanguageModel
from gptattn.training.run import train
from measuring.gpu_lab import Cell, Lab

FORBIDDEN = range(3, 6)  # steps in which the host may not wait


def loop_cells() -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of the part `loop` by name."""
    return {
        "train.py, eager": lambda lab: against_events(lab, compiled=False),
        "train.py, compiled": lambda lab: against_events(lab, compiled=True),
        "a NaN ends the run": nan_is_found,
    }


def resume_cells() -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of the part `resume` by name."""
    return {"stopped and resumed = whole": resumed}


def against_events(lab: Lab, compiled: bool) -> Cell:
    """A run's own figures beside events around its steps; in steps 3 to 5 waiting is an error."""
    marks: list[torch.cuda.Event] = []
    peak: list[float] = []

    def look(module: LanguageModel) -> None:
        if not lab.on_gpu:
            return
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        # Compiling may wait, so this is asked of the eager run.
        forbidden = not compiled and module.global_step + 1 in FORBIDDEN
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
        peak[:] = [torch.cuda.max_memory_allocated() / 1e6]

    with tempfile.TemporaryDirectory() as folder, after_each_step(look):
        compiling = "true" if compiled and not lab.tiny else "false"
        own = (f"budget.steps={lab.size(300, 6)}", f"compile={compiling}", "checkpoint=false")
        metrics = train(run_settings(lab, Path(folder), *own), Path(folder) / "run")["metrics"]
    cell = {name: metrics[f"perf/{name}"] for name in ("tokens_per_s", "step_ms", "mfu")}
    cell["peak_mb"] = metrics["perf/peak_memory_training_mb"]
    if not lab.on_gpu:
        return cell
    torch.cuda.synchronize()
    events = median(first.elapsed_time(last) for first, last in pairwise(marks[5:]))
    off = metrics["perf/step_ms"] / events - 1
    # The run's validation, which has no gradients, comes after the newest look.
    right_peak = abs(cell["peak_mb"] / peak[0] - 1) < 0.02
    return cell | {"clock_off": off, "ok": abs(off) < 0.02 and right_peak}


def nan_is_found(lab: Lab) -> Cell:
    """A NaN among the weights after step 3 ends the run, whose checkpoint is that of step 2."""

    def spoil(module: LanguageModel) -> None:
        if module.global_step == 3:
            with torch.no_grad():
                next(module.parameters()).fill_(torch.nan)

    with tempfile.TemporaryDirectory() as folder, after_each_step(spoil):
        run = Path(folder) / "run"
        own = ("budget.steps=8", "log_every=2", "validation.count=4")
        cfg = run_settings(lab, Path(folder), *own)
        try:
            train(cfg, run)
        except NumericError as error:
            kept = [file.stem for file in RunFolder(run).known_checkpoints()]
            return {"said": str(error), "ok": len(kept) == 1}
    return {"ok": False}


def resumed(lab: Lab) -> Cell:
    """A deterministic run that is stopped between two rows, and one that is not: equal weights."""
    with tempfile.TemporaryDirectory() as folder:
        own = ("budget.steps=12", "trainer.deterministic=true", "log_every=5")
        cfg = run_settings(lab, Path(folder), *own)
        whole, parts = (weights_after(cfg, Path(folder) / f"stop_{n}", n) for n in (None, 8))
    same = all(torch.equal(value, parts[name]) for name, value in whole.items())
    return {"stopped_after": 8, "of_steps": 12, "ok": same}


def weights_after(cfg: TrainConfig, folder: Path, stop: int | None) -> dict[str, torch.Tensor]:
    """Return the weights of a run that is asked to stop after step `stop`, and resumed.

    Raises RuntimeError if it did not stop then. With None it is not asked.
    """

    def ask(module: LanguageModel) -> None:
        # This hook comes after those that look for a signal, so the next step's find it.
        if stop is not None and module.global_step + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with after_each_step(ask):
            train(cfg, folder)
    except Stopped as stopped:
        if stopped.step != stop:
            raise
        train(cfg, folder, resume=True)
    else:
        if stop is not None:
            raise RuntimeError(f"the run did not stop after step {stop}")
    return weights_of(read_checkpoint(RunFolder(folder).known_checkpoints()[0]))


def run_settings(lab: Lab, folder: Path, *overrides: str) -> TrainConfig:
    """Return settings of a run on Python's language reference, without what interrupts steps."""
    return lab.settings(
        f"cache_dir={folder / 'cache'}",
        f"batch_size={lab.size(16, 4)}",
        f"model.vocab_size={lab.size(50304, 256)}",
        f"trainer.threads={lab.size(8, 1)}",
        "validation.count=1",
        "sample.tokens=0",
        "log_every=10000",
        *overrides,
    )


@contextmanager
def after_each_step(look: Callable[[LanguageModel], None]) -> Iterator[None]:
    """In this block, call `look(module)` when a step of a run has been launched."""

    def hook(self: LanguageModel, *_: Any) -> None:
        look(self)

    before = LanguageModel.on_train_batch_end
    LanguageModel.on_train_batch_end = hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        LanguageModel.on_train_batch_end = before  # type: ignore[method-assign]
