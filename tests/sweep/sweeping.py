"""Sweeps in this process, whose launcher ends each run at once with a loss of the test's choice."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from runfolders import write_run
from support import tiny

from gptattn.runs.folder import RunFolder
from gptattn.settings.compose import CONF, from_hydra
from gptattn.settings.config import TrainConfig
from gptattn.sweep.loop import run_sweep
from gptattn.training.preflight import preflight

# A loss ends the run well, an int fails it with that exit code, and an exception goes through.
Outcome = float | int | BaseException
OWN = ("budget.steps=1", "validation.count=1", "sample.tokens=0", "checkpoint=false")


class Launcher:
    """A launcher of Hydra, as a sweep's loop uses it."""

    def __init__(self, outcome: Callable[[TrainConfig], Outcome]) -> None:
        self.outcome = outcome
        self.loader: Any = None
        self.config: Any = None
        self.launched: list[tuple[str, int]] = []  # variant and seed, in order
        self.resumed: list[str] = []  # names of run folders
        self.jobs: list[list[str]] = []
        self.batches: list[tuple[int, int]] = []  # where each begins, and its length

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[object]:
        self.batches.append((initial_job_idx, len(jobs)))
        for overrides in jobs:
            self.jobs.append([*overrides])
            node = self.loader.load_sweep_config(self.config, list(overrides))
            if node.resume is not None:
                self.resumed.append(Path(node.resume).name)
                continue
            HydraConfig.instance().set_config(node)
            cfg = preflight(from_hydra(node, node.hydra))
            self.launched.append((cfg.cfg.variant, cfg.cfg.seed))
            outcome, run = self.outcome(cfg.cfg), RunFolder(Path(node.run_dir))
            if isinstance(outcome, BaseException):
                raise outcome
            if isinstance(outcome, float):
                seconds = {"progress/seconds": 60.0}
                write_run(run.path, cfg.cfg.variant, cfg.cfg.seed, outcome, metrics=seconds)
            run.path.mkdir(parents=True, exist_ok=True)
            run.write_settings(cfg.cfg)
            run.write_making(cfg.making)
            if isinstance(outcome, int):
                run.write_failure(outcome, "it is unlucky")
        return []


def sweep(
    folder: Path,
    launcher: Launcher,
    *arguments: str,
    variants: Sequence[str] | None = None,
    tune: dict[str, Any] | None = None,
    max_batch_size: int | None = None,
) -> None:
    """Run `train.py -m ARGUMENTS` in `folder`, as Hydra's sweeper would, with this launcher."""
    given = [a for a in arguments if a.startswith("sweep.")]
    swept = [a for a in arguments if a not in given]
    sweeper = SimpleNamespace(variants=variants, tune=tune, max_batch_size=max_batch_size)
    with (
        contextlib.chdir(folder),
        initialize_config_dir(version_base="1.3", config_dir=str(CONF)),
    ):
        loader = GlobalHydra.instance().config_loader()
        own = tiny(folder, *OWN, *given)
        config = loader.load_configuration("train", own, run_mode=RunMode.MULTIRUN)
        HydraConfig.instance().set_config(config)
        launcher.loader, launcher.config = loader, config
        run_sweep(loader, config, launcher, sweeper, [*own, *swept])
