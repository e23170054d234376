"""Decides when a run's state is saved, and adds to it what Lightning does not save by itself."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from gptattn.errors import CheckpointError, NumericError, lacks_memory
from gptattn.machine.signals import StopRequest
from gptattn.machine.world import is_lost
from gptattn.runs.checkpoint import read_checkpoint, remove_checkpoint, remove_old, write_checkpoint
from gptattn.runs.folder import RunFolder


class AtomicCheckpointIO(CheckpointIO):
    """Writes and reads checkpoints for Lightning.

    `content` is the content of the checkpoint from which the run is resumed, which has been read
    and checked already; the first `load_checkpoint` returns it instead of reading the file again.
    """

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._content = content

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        write_checkpoint(Path(path), checkpoint)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        # Returned once only: it is three times as large as the model, and memory is freed.
        content, self._content = self._content, None
        return dict(content) if content else read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        remove_checkpoint(Path(path))


class Checkpoints(Checkpoint):
    """Saves after each validation and when the run is asked to stop; keeps the newest two.

    A checkpoint is always taken between two steps. One that is saved because of a stop comes before
    the validation that may be due after its step. When the run is resumed from it, Lightning
    replays that step, the module skips it, and the validation follows. With `run` None nothing is
    saved. `facts` are plain values that a resumed run is compared with.
    """

    def __init__(self, run: RunFolder | None, stop: StopRequest, facts: dict[str, Any]) -> None:
        self.run, self.stop, self.facts = run, stop, facts
        self._validated = True  # False: the validation after the newest step may still be due
        self._generators: dict[str, Any] | None = None  # states to restore
        self._restoring = False

    def state_dict(self) -> dict[str, Any]:
        return self.facts | {"validated": self._validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validated = state_dict["validated"]

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["generator"] = generator_states()
        # Lightning's counters depend on the hook in which they are saved. Ours must not, because
        # every checkpoint is taken between two steps.
        set_loops(checkpoint, trainer.global_step - (not self._validated))

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._generators = checkpoint["generator"]

    @contextlib.contextmanager
    def restoring(self, source: Path | None) -> Iterator[None]:
        """In this block, turn errors while Lightning restores `source` into CheckpointError.

        Errors after the restoring, and all errors if `source` is None, pass unchanged.
        """
        self._restoring = source is not None
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if not self._restoring or lacks_memory(error) or is_lost(error):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                "checkpoint", f"{source} cannot be resumed from ({reason[:300]})"
            ) from error

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._generators is not None:
            pl_module.skip_replayed_step = not self._validated
            # As late as possible, so that nothing draws from them before the first step.
            restore_generators(self._generators)
            self._generators = None
        self._restoring = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._save(trainer, validated=True)
            if self.stop.asked():
                self.stop.raise_stopped(trainer.global_step, self.run is not None)

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        if self.stop.asked():
            self._save(trainer, validated=False)
            self.stop.raise_stopped(trainer.global_step, self.run is not None)

    def save_at_stop(self, trainer: L.Trainer) -> None:
        """Save the newest step for a stop, unless that has been done after its validation."""
        if self.run is not None and not self.run.checkpoint(trainer.global_step).exists():
            self._save(trainer, validated=False)

    def _save(self, trainer: L.Trainer, *, validated: bool) -> None:
        if self.run is None:
            return
        check_finite(trainer)
        for logger in trainer.loggers:
            logger.save()  # the rows that the checkpoint counts must be on the disk before it
        self._validated = validated
        path = self.run.checkpoint(trainer.global_step)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            remove_old(self.run, path)


def set_loops(checkpoint: dict[str, Any], step: int) -> None:
    """Set Lightning's counters to `step` whole steps; a run has a single epoch."""
    loops = checkpoint["loops"]["fit_loop"]
    places = {
        "epoch_loop.batch_progress": step,
        "epoch_loop.manual_optimization.optim_step_progress": step,
        "epoch_loop.val_loop.batch_progress": 0,
    }
    for place, count in places.items():
        for span in ("total", "current"):
            loops[place][span] = dict.fromkeys(loops[place][span], count)
    loops["epoch_loop.batch_progress"]["is_last_batch"] = False
    loops["epoch_loop.val_loop.batch_progress"]["is_last_batch"] = False
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step


def check_finite(trainer: L.Trainer) -> None:
    """Raise NumericError, naming the tensor, if a weight or an optimizer average is NaN or Inf."""
    module = trainer.lightning_module
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in module.named_parameters()
    }
    # Not the buffers: one may be a mask of -inf.
    values = [(f"weight {name}", value) for name, value in module.named_parameters()]
    for optimizer in trainer.optimizers:
        for parameter, averages in optimizer.state.items():
            values += [(f"{key} of {names[parameter]}", value) for key, value in averages.items()]
    for name, value in values:
        if isinstance(value, torch.Tensor) and not torch.isfinite(value).all():
            raise NumericError(
                name,
                f"is not finite after step {trainer.global_step}; the checkpoint before it stays; "
                "try a lower optim.lr",
            )


def generator_states() -> dict[str, Any]:
    """Return the states of all random generators that a model or a library may draw from.

    Those of Python and NumPy are the 624 words of a Mersenne twister; Python adds the position in
    them as word 625.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": {"version": version, "words": _words(words), "gauss": gauss},
        "numpy": {"name": name, "words": _words(keys), "rest": [position, has_gauss, cached]},
    }


def _words(words: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(words, dtype=np.uint32))


def restore_generators(states: dict[str, Any]) -> None:
    """Restore the states that `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state((numpy["name"], numpy["words"].numpy(), *numpy["rest"]))
