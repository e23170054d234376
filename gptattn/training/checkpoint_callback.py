"""When a run's state is saved, and all of it that Lightning does not save by itself."""

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
from gptattn.runs.checkpoint import read_checkpoint, remove_checkpoint, remove_old, write_checkpoint
from gptattn.runs.folder import RunFolder


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's way to our checkpoints: a name means a whole file.

    `content` is that of the checkpoint from which a run goes on, read and checked already.
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
        content, self._content = self._content, None  # it is as large as the model, thrice
        return content or read_checkpoint(Path(path), map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove_checkpoint(Path(path))


class Checkpoints(Checkpoint):
    """Saves after each validation, and where a run is asked to stop; keeps the newest two.

    Both are step boundaries. A state saved in a stop is that after the step and before the
    validation that may follow: the resumed run comes to that step again, takes nothing of it, and
    goes on from there the way that it would have gone. `run` None: nothing is saved. `facts`
    are plain values that a resumed run is compared with.
    """

    def __init__(self, run: RunFolder | None, stop: StopRequest, facts: dict[str, Any]) -> None:
        self.run, self.stop, self.facts = run, stop, facts
        self._validated = True  # whether the validation, if any, after the newest step is done
        self._loaded: dict[str, Any] | None = None
        self._restoring = False

    def state_dict(self) -> dict[str, Any]:
        own = {"validated": self._validated, "generators": generator_states()}
        return self.facts | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning's counters depend on the hook in which they are saved; a step boundary is one
        # thing, whichever hook it is seen from.
        set_loops(checkpoint, trainer.global_step - (not self._validated))

    @contextlib.contextmanager
    def restoring(self, source: Path | None) -> Iterator[None]:
        """Raise CheckpointError where `source` breaks what Lightning restores from it."""
        self._restoring = source is not None
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if not self._restoring or lacks_memory(error):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                "checkpoint", f"{source} cannot be gone on from ({reason[:300]})"
            ) from error

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._loaded is not None:
            pl_module.repeats_step = not self._loaded["validated"]
            # As late as can be: nothing until the first step may draw from them.
            restore_generators(self._loaded["generators"])
            self._loaded = None
        self._restoring = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._save(trainer, validated=True)
            if self.stop.signum is not None:
                self.stop.grant(trainer.global_step, self.run is not None)

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        if self.stop.signum is not None:
            self._save(trainer, validated=False)
            self.stop.grant(trainer.global_step, self.run is not None)

    def _save(self, trainer: L.Trainer, *, validated: bool) -> None:
        if self.run is None:
            return
        check_finite(trainer)
        for logger in trainer.loggers:
            logger.save()  # the rows that the checkpoint counts are on the disk before it
        self._validated = validated
        path = self.run.checkpoint(trainer.global_step)
        trainer.save_checkpoint(path)
        remove_old(self.run, path)


def set_loops(checkpoint: dict[str, Any], step: int) -> None:
    """Make Lightning's counters those after `step` whole steps of the one epoch that a run has."""
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
    """Raise NumericError, naming it, for a weight or optimizer average that is NaN or Inf."""
    module = trainer.lightning_module
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in module.named_parameters()
    }
    values = [(f"weight {name}", value) for name, value in module.state_dict().items()]
    for optimizer in trainer.optimizers:
        for parameter, averages in optimizer.state.items():
            values += [(f"{key} of {names[parameter]}", value) for key, value in averages.items()]
    for name, value in values:
        if isinstance(value, torch.Tensor) and not torch.isfinite(value).all():
            raise NumericError(
                name,
                f"is not finite after step {trainer.global_step}; the checkpoint before it stays; "
                "a lower optim.lr would be steadier",
            )


def generator_states() -> dict[str, Any]:
    """The states of all generators that a model or a library may draw from, as plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": (name, torch.tensor(np.asarray(keys).tolist()), position, has_gauss, gauss),
    }


def restore_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"]:
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
