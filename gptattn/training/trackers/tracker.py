"""What a tracker is, which ones a run has, and whether their libraries are there."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gptattn.errors import ConfigError
from gptattn.settings.config import TrainConfig
from gptattn.settings.construct import construct

ALWAYS_ON = "tensorboard"  # `RunRecorder` itself writes its events


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run. `id`: what it called the run before; None: a new run."""

    name: str
    experiment: str
    variant: str
    seed: int
    hyperparameters: dict[str, Any]
    place: Path  # the folder for its files, in the run's own
    id: str | None = None


class Tracker(ABC):
    """Opens one of Lightning's loggers for a run. Its arguments are its settings in `conf/logger`.

    `libraries`: the modules that it needs, and `install`: what pip is to be given for them.
    `keeps`: what was logged is still there when the run is resumed.
    """

    libraries: tuple[str, ...] = ()
    install: str = ""
    keeps: bool = True

    @abstractmethod
    def open(self, run: TrackedRun) -> Any:
        """Return the Lightning logger of the run, its hyperparameters logged.

        Its `version` is the run's id. May raise any exception.
        """

    def close(self, logger: Any, done: bool) -> None:
        """End the session. Without `done` the run was stopped or has failed, and may go on."""
        logger.finalize("success" if done else "failed")

    def missing(self) -> list[str]:
        """Return the libraries that are not installed."""
        # A folder of the name, such as the `wandb` that wandb makes, has no origin.
        found = {name: find_spec(name) for name in self.libraries}
        return [name for name, spec in found.items() if spec is None or spec.origin is None]


def trackers_of(cfg: TrainConfig) -> dict[str, Tracker]:
    """Return the trackers of these settings by their names, without TensorBoard.

    Raises ConfigError, naming the field, for a setting that does not fit or a missing library.
    """
    return {name: _tracker(cfg, name) for name in cfg.logger if name != ALWAYS_ON}


def _tracker(cfg: TrainConfig, name: str) -> Tracker:
    spec = cfg.logger[name]
    if "_target_" not in spec:
        raise ConfigError(f"logger.{name}", f"is not chosen; give logger=[{name}] as well")
    tracker = construct(f"logger.{name}", spec, {}, cfg.allow_targets)
    if not isinstance(tracker, Tracker):
        raise ConfigError(f"logger.{name}._target_", "is not a gptattn.training.trackers Tracker")
    if missing := tracker.missing():
        install = tracker.install or missing[0]
        raise ConfigError(
            "logger", f"{name} needs the library {' and '.join(missing)}: pip install {install}"
        )
    return tracker
