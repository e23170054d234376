"""Hydra's plugins for a sweep: a sweeper that skips finished runs, and a launcher that gives each
run its own process. Hydra looks for plugins in this folder, so imports here stay light.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class GridSweeper(Sweeper):
    """Checks every combination of values, then runs those that are not finished.

    `variants` are overrides that belong together; each is combined with all values of `params`.
    `tune`: a first stage finds each variant's learning rate. See `gptattn.sweep.loop`.
    """

    def __init__(
        self,
        params: dict[str, Any] | None = None,
        variants: list[str] | None = None,
        tune: dict[str, Any] | None = None,
    ) -> None:
        self.params, self.variants, self.tune = params, variants, tune

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from gptattn.sweep.loop import run_sweep

        typed = {argument.partition("=")[0] for argument in arguments}
        params = (self.params or {}).items()
        given = [f"{name}={value}" for name, value in params if name not in typed]
        assert self.hydra_context is not None
        assert self.config is not None
        loader = self.hydra_context.config_loader
        run_sweep(loader, self.config, self.launcher, self, [*given, *arguments])


class ProcessLauncher(Launcher):
    """Runs each job in its own process on this machine; see `gptattn.sweep.launcher`."""

    slots = 1  # runs at a time; the sweep's loop sets it

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from gptattn.sweep.launcher import launch_processes

        return launch_processes(
            self.hydra_context, self.config, job_overrides, initial_job_idx, self.slots
        )
