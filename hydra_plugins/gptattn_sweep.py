"""Hydra's side of a sweep: a sweeper that skips finished runs, and a launcher that gives each run
its own process. Hydra looks for plugins in this folder, so imports stay light here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError

if TYPE_CHECKING:
    from gptattn.sweep.checks import Follow
    from gptattn.sweep.plan import Plan


MOST_RUNS = 10_000  # of one sweep


def _check_size(overrides: Sequence[Override]) -> None:
    """Raise ConfigError for a sweep of no runs or of more than MOST_RUNS, without listing them."""
    runs = 1
    for override in overrides:
        if override.is_sweep_override():
            try:
                values = islice(override.sweep_string_iterator(), MOST_RUNS + 1)
                runs = min(runs * sum(1 for _ in values), MOST_RUNS + 1)
            except (ValueError, ArithmeticError):  # a range with a step of 0, or of nan
                raise ConfigError(override.key_or_group, "is not a valid range") from None
            if runs == 0:
                raise ConfigError(override.key_or_group, "has no value; give one or more")
    if runs > MOST_RUNS:
        raise ConfigError("command line", f"asks for more than {MOST_RUNS:,} runs; give fewer")


class LedgerSweeper(BasicSweeper):
    """Hydra's basic sweeper, with four changes.

    All runs are checked before the first starts, finished runs are not repeated, a failed run does
    not end the sweep, and one table is printed at the end. `uptrain` adds runs that start from the
    weights of others; see `gptattn.sweep.second_stage`.
    """

    def __init__(
        self,
        max_batch_size: int | None,
        params: dict[str, str] | None = None,
        uptrain: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        self.uptrain = uptrain  # None: no second stage

    def sweep(self, arguments: list[str]) -> Any:
        from gptattn.machine.console import make_console
        from gptattn.machine.signals import ending_at_once
        from gptattn.sweep.estimate import Estimator

        assert self.hydra_context is not None
        assert self.config is not None
        assert self.launcher is not None
        loader = self.hydra_context.config_loader
        parser = OverridesParser.create(config_loader=loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        _check_size(overrides)
        batches = self.split_arguments(overrides, self.max_batch_size)
        jobs = [job for batch in batches for job in batch]
        make_console().print(f"planning {len(jobs):,} run{'s' * (len(jobs) != 1)}")
        in_processes = isinstance(self.launcher, ProcessLauncher)
        with Estimator() if in_processes else nullcontext() as estimator:
            plans = self._planned(jobs)
            with ending_at_once():
                from gptattn.sweep.run_sweep import run_sweep

            return run_sweep(
                plans,
                Path(self.config.hydra.sweep.dir),
                self._launch,
                in_processes=in_processes,
                estimate=estimator.expected_seconds if estimator is not None else None,
                follow=self._follow(plans) if self.uptrain is not None else None,
            )

    def _planned(self, jobs: Sequence[Sequence[str]]) -> list[Plan]:
        from gptattn.cli.planning import planned
        from gptattn.machine.console import make_console
        from gptattn.sweep.sweep_progress import counted

        assert self.hydra_context is not None
        assert self.config is not None
        plans = planned(self.hydra_context.config_loader, self.config, jobs)
        shown = counted(plans, len(jobs), "planned", make_console())
        # Ordered by seed first, so that a sweep that is stopped early has run every variant.
        in_order = sorted(shown, key=lambda numbered: (numbered[1].cfg.seed, numbered[0]))
        return [plan for _, plan in in_order]

    def _follow(self, first: Sequence[Plan]) -> Follow:
        from gptattn.cli.jobs import quoted
        from gptattn.cli.planning import planned
        from gptattn.sweep.second_stage import check_first_stage, second_stage, uptrain_of

        assert self.hydra_context is not None
        assert self.config is not None
        loader, config = self.hydra_context.config_loader, self.config
        assert self.uptrain is not None
        stage = uptrain_of(self.uptrain)
        check_first_stage(stage, first)
        number = len(first)

        def follow(plan: Plan, folder: Path) -> list[Plan]:
            nonlocal number
            jobs = second_stage(stage, plan, folder, quoted)
            plans = sorted(planned(loader, config, jobs, number), key=itemgetter(0))
            number += len(jobs)
            return [plan for _, plan in plans]

        return follow

    def _launch(self, plans: Sequence[Plan]) -> Sequence[JobReturn]:
        from gptattn.cli.jobs import job_of

        assert self.launcher is not None
        assert self.config is not None
        OmegaConf.save(self.config, Path(self.config.hydra.sweep.dir) / "multirun.yaml")
        size = self.max_batch_size or len(plans)
        returns: list[JobReturn] = []
        for start in range(0, len(plans), size):
            some = plans[start : start + size]
            if isinstance(self.launcher, ProcessLauncher):
                returns += self.launcher.run(some)
            else:
                jobs = [job_of(plan) for plan in some]
                returns += self.launcher.launch(jobs, initial_job_idx=start)
        return returns


class ProcessLauncher(Launcher):
    """Runs each job in its own process, `sweep.jobs` at once; see `gptattn.sweep.processes`."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from gptattn.cli.planning import planned

        loader = self.hydra_context.config_loader
        plans = sorted(
            planned(loader, self.config, job_overrides, initial_job_idx), key=itemgetter(0)
        )
        return self.run([plan for _, plan in plans])

    def run(self, plans: Sequence[Plan]) -> Sequence[JobReturn]:
        """Like `launch`, for runs that are planned already."""
        from gptattn.cli.jobs import worker_command
        from gptattn.sweep.run_sweep import run_in_processes

        returns = []
        for plan, result in run_in_processes(plans, partial(worker_command, self.config)):
            failed = isinstance(result, Exception)
            status = JobStatus.FAILED if failed else JobStatus.COMPLETED
            returns.append(JobReturn(overrides=plan.overrides, _return_value=result, status=status))
        return returns
