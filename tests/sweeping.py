"""Sweeps in this process, whose launcher ends each run at once with a loss of the test's choice."""

import contextlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from building import settings
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from runfolders import write_run
from support import tiny

from gptattn.runs.folder import RunFolder
from gptattn.settings.compose import CONF
from gptattn.settings.compose import settings as compose_settings
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import hash_kernels
from gptattn.sweep.loop import run_sweep
from gptattn.training.preflight import PreparedRun, preflight

# A loss ends the run well, an int fails it with that exit code, and an exception goes through.
Outcome = float | int | BaseException
OF_A_RUN = ("seed=", "optim.lr=", "run_dir=", "resume=", "++compile=")
OWN = (
    "budget.steps=1",
    "validation.count=1",
    "sample.tokens=0",
    "checkpoint=false",
    "sweep.speed=false",
)


@lru_cache
def get_ready(*overrides: str) -> PreparedRun:
    """What all runs with these overrides share."""
    return preflight(settings(*overrides))


COMPOSED: dict[tuple[str, ...], DictConfig] = {}


def compose_once(overrides: tuple[str, ...], make: Callable[[], DictConfig]) -> DictConfig:
    """Compose equal jobs of all tests once."""
    if overrides not in COMPOSED:
        COMPOSED[overrides] = make()
    return deepcopy(COMPOSED[overrides])


class Launcher:
    """A launcher of Hydra, as a sweep's loop uses it."""

    def __init__(self, outcome: Callable[[TrainConfig], Outcome]) -> None:
        self.outcome = outcome
        self.shared: list[str] = []  # overrides of all runs
        self.commands: list[Sequence[str]] = []
        self.launched: list[tuple[str, int]] = []  # variant and seed, in order
        self.resumed: list[str] = []  # names of run folders

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[object]:
        self.commands += jobs
        for overrides in jobs:
            own = dict(o.split("=", 1) for o in overrides if o.startswith(OF_A_RUN))
            if "resume" in own:
                self.resumed.append(Path(own["resume"].strip("'")).name)
                continue
            if "$" in str(overrides):  # a setting may depend on the rate
                prepared = preflight(compose_settings([*self.shared, *overrides]))
            else:
                rest = (o for o in overrides if not o.startswith(OF_A_RUN))
                prepared = get_ready(*self.shared, *rest)
            optim = replace(
                prepared.cfg.optim, lr=float(own.get("optim.lr", prepared.cfg.optim.lr))
            )
            compiles = own.get("++compile", str(prepared.cfg.compile).lower()) == "true"
            cfg = replace(prepared.cfg, seed=int(own.get("seed", 1)), optim=optim, compile=compiles)
            self.launched.append((cfg.variant, cfg.seed))
            outcome, run = self.outcome(cfg), RunFolder(Path(own["run_dir"].strip("'")))
            if isinstance(outcome, BaseException):
                raise outcome
            if isinstance(outcome, float):
                seconds = {"progress/seconds": 60.0}
                write_run(run.path, cfg.variant, cfg.seed, outcome, metrics=seconds)
            run.path.mkdir(parents=True, exist_ok=True)
            run.write_settings(cfg)
            made = prepared.provenance
            run.write_provenance(replace(made, code=made.code | hash_kernels(cfg, made.device)))
            if isinstance(outcome, int):
                run.write_failure(outcome, "it is unlucky")
        return []


def sweep(
    folder: Path,
    launcher: Launcher,
    *arguments: str,
    variants: Sequence[str] | None = None,
    tune: dict[str, Any] | None = None,
) -> None:
    """Run `train.py -m ARGUMENTS` in `folder`, as Hydra's sweeper would, with this launcher."""
    given = [a for a in arguments if a.startswith("sweep.")]
    swept = [a for a in arguments if a not in given]
    sweeper = SimpleNamespace(variants=variants, tune=tune)
    with (
        contextlib.chdir(folder),
        initialize_config_dir(version_base="1.3", config_dir=str(CONF)),
    ):
        own = tiny(folder.parent / "swept", *OWN, *given)  # one text for all tests
        hydra = GlobalHydra.instance().config_loader()
        make = partial(hydra.load_configuration, "train", own, RunMode.MULTIRUN)
        config = compose_once(("-m", *own), make)

        def load_sweep_config(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
            make = partial(hydra.load_sweep_config, config, [*overrides])
            return compose_once((*own, *overrides), make)

        loader: Any = SimpleNamespace(load_sweep_config=load_sweep_config)
        HydraConfig.instance().set_config(config)
        launcher.shared = own
        run_sweep(loader, config, launcher, sweeper, [*own, *swept])
