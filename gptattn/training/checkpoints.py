"""Saves a run's state after validations and on signals, with what Lightning leaves out."""

import random
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from gptattn.errors import NumericError
from gptattn.machine.ending import WORDS, Stopped, handled_signals, write_stderr
from gptattn.runs.checkpoint import read_checkpoint, remove_old, write_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.training.callbacks import StepClock
from gptattn.training.preflight import PreparedRun
from gptattn.training.record import MetricsFile


class SafeCheckpointIO(CheckpointIO):
    """Writes and reads checkpoints for Lightning: safetensors and JSON, no pickle."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, *args: Any, **kwargs: Any
    ) -> None:
        write_checkpoint(Path(path), checkpoint)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


class Checkpoints(Checkpoint):
    """Saves after each validation and when a signal stops the run; keeps the newest two.

    A validation writes only at its end, so an abandoned one writes nothing. `record`: None in all
    processes but the first.
    """

    def __init__(
        self, prepared: PreparedRun, run: RunFolder, clock: StepClock, record: MetricsFile | None
    ) -> None:
        self.state, self.saves = prepared.state, prepared.cfg.checkpoint
        self.run, self.clock, self.record = run, clock, record
        self.signum = 0  # the first signal to stop the run
        self._in_step = False  # in a step, or about to begin one
        self._step = 0  # the newest finished one

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.state.step = trainer.global_step
        self.state.row_bytes = 0 if self.record is None else self.record.size
        if not self.state.validation_due:  # a validation may have drawn from them
            self.state.generators = read_generators()
        self.state.store(checkpoint)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # Lightning's own handlers end a run with exit code 0 and save nothing. It restores the
        # earlier handlers after the run.
        for number in handled_signals():
            signal.signal(number, self._note)
        # Lightning would exchange SIGTERM before each step, and the host would wait for its GPU.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._step = trainer.global_step
        if generators := self.state.generators:
            # As late as possible, so that nothing draws from them before the first step.
            torch.set_rng_state(generators["torch"])
            if generators["cuda"]:
                torch.cuda.set_rng_state_all(generators["cuda"])
            version, words, gauss = generators["python"]
            random.setstate((version, tuple(words), gauss))
            np.random.set_state(generators["numpy"])
        else:
            torch.randn(1024, 1024)  # dropout masks depend on drawing this many numbers first
        if self.state.validation_due:  # Lightning would continue with the next step
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False
            trainer.validating = True
            loop.run()
            trainer.training = True
        self._in_step = True

    def _note(self, signum: int, frame: object) -> None:
        if self.signum == 0:
            self.signum = signum
            again = "; Ctrl-C again stops it now" if signum == signal.SIGINT else ""
            what = f"stopping after this step{again}" if self._in_step else "saving"
            due = "; a resumed run begins with this validation" if self.state.validation_due else ""
            write_stderr(f"{WORDS[signal.Signals(signum)]}: {what}{due}")
        elif signum == signal.SIGINT and self._in_step:
            raise KeyboardInterrupt

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # a micro-batch
        self._in_step = False
        self._step = trainer.global_step
        every = trainer.val_check_batch
        if trainer.should_stop or (every is not None and (batch_idx + 1) % every == 0):
            self.state.generators = read_generators()
            self.state.validation_due = True  # its first batch ends a run that must stop
        else:
            self._stop_if_asked(trainer, pl_module)
            self._in_step = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.state.validation_due = False
        self._save(trainer, pl_module)
        if self._must_stop(trainer):
            raise Stopped(self.signum, trainer.global_step, self.saves)
        self._in_step = True

    def _must_stop(self, trainer: L.Trainer) -> bool:
        """Whether the run must stop. All its processes check at the same points."""
        signum = self.signum
        if trainer.world_size > 1:
            highest = torch.tensor(signum)  # on the host, so that it waits for no GPU
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
            signum = int(highest)
            # A signal that came during the exchange counts at the next one.
            self.signum = signum or self.signum
        return signum != 0

    def _stop_if_asked(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if self._must_stop(trainer):
            self._save(trainer, pl_module)
            raise Stopped(self.signum, trainer.global_step, self.saves)

    on_validation_batch_start = on_validation_epoch_end = _stop_if_asked

    def _save(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self.saves:
            return
        self.clock.settle()
        for name, weight in pl_module.named_parameters():  # a buffer may be a mask of -inf
            if not torch.isfinite(weight).all():
                raise NumericError(
                    f"weight {name}",
                    f"is not finite after step {trainer.global_step}; try a lower optim.lr (the "
                    "earlier checkpoint is kept)",
                )
        for logger in trainer.loggers:
            logger.save()  # rows that the checkpoint counts must reach the disk before it
        path = self.run.checkpoint(trainer.global_step)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            remove_old(self.run, path)


def read_generators() -> dict[str, Any]:
    """Return the states of all global random generators, for `RunState`."""
    numbers: Any = np.random.get_state(legacy=False)
    numbers["state"]["key"] = numbers["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),  # only the user's code draws from this and numpy's
        "numpy": numbers,
    }
