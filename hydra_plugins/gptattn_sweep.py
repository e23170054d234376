"""Hydra's side of a sweep: a sweeper that skips finished runs, and a launcher that gives each run
its own process. Hydra looks for plugins in this folder, so imports stay light here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError, SweepError

if TYPE_CHECKING:
    from gptattn.cli.sweep_jobs import Jobs
    from gptattn.sweep.ledger import Ledger
    from gptattn.sweep.one_precision import OnePrecision
    from gptattn.sweep.plan import Plan
    from gptattn.sweep.run_sweep import Swept
    from gptattn.sweep.stages import Later


class LedgerSweeper(BasicSweeper):
    """Hydra's basic sweeper, with six changes.

    All runs are checked before the first starts, finished runs are not repeated, a failed run does
    not end the sweep, and one table is printed at the end. `variants` are overrides that belong
    together, for a product with those of `params`. A second stage follows with `uptrain`, whose
    runs start from the weights of others (`gptattn.sweep.second_stage`), or with `tune`, where the
    first finds each variant's learning rate (`gptattn.sweep.tuning`). With `sweep.until`, more
    seeds follow (`gptattn.sweep.until`).
    """

    def __init__(
        self,
        max_batch_size: int | None,
        params: dict[str, str] | None = None,
        uptrain: dict[str, Any] | None = None,
        variants: list[str] | None = None,
        tune: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        self.uptrain, self.variants, self.tune = uptrain, variants, tune
        self.precision: OnePrecision | None = None
        self.end = math.inf  # time.monotonic() when the sweep's minutes are over

    def sweep(self, arguments: list[str]) -> Any:
        from gptattn.cli.sweep_jobs import jobs_of, with_seeds
        from gptattn.machine.console import make_console
        from gptattn.sweep.ledger import Ledger
        from gptattn.sweep.until import Until, check_one_until

        assert self.hydra_context is not None
        assert self.config is not None
        self._start_clock()
        loader = self.hydra_context.config_loader
        jobs = jobs_of(loader, [*self._parse_config(), *arguments], self.variants, self._rungs())
        home = Path(self.config.hydra.sweep.dir)
        check_one_until(jobs, self.config.sweep.until)
        shared = bool(self.config.sweep.shared)
        if self.config.sweep.until is None:
            return self._swept(jobs, Ledger(home, shared=shared)).returns()
        if self.uptrain is not None:
            raise ConfigError("sweep.until", "has no place beside uptrain; leave one out")
        tuning = {self.tune["seed"]} if self.tune is not None and "seed" in self.tune else set()
        until = Until(home, tuning)
        # No other sweep comes between the stages, and `compare.py --watch` waits for the second.
        with closing(Ledger(home, keeps=True, shared=shared)) as ledger:
            first = self._swept(jobs, ledger, until.begin)
            if not first.complete or not first.results:
                return first.returns()
            decision = until.decide(first.results)
            for line in decision.lines:
                make_console().print(line, markup=False, soft_wrap=True)
            if not decision.counts:
                return first.returns()
            more = with_seeds(jobs, decision.seeds, decision.together)
            second = self._swept(more, ledger, decision.chosen)
            if first.error is not None and second.error is not None:
                both = f"{first.error.message}; then {second.error.message}"
                raise SweepError(both, first.error.exit_code)
            first.returns()  # what failed there is an error, though the others went on
            return second.returns()

    def _swept(
        self, asked: Jobs, ledger: Ledger, chosen: Callable[[list[Plan]], list[Plan]] = list
    ) -> Swept:
        """Run the plans of the jobs, of those that are compared the ones that `chosen` returns."""
        from gptattn.machine.console import make_console
        from gptattn.machine.signals import ending_at_once
        from gptattn.sweep.estimate import Estimator

        assert self.config is not None
        jobs, at_rates = self._at_rates(asked) if self.tune is not None else (asked, {})
        total = sum(map(len, jobs.values()))
        make_console().print(f"planning {total:,} run{'s' * (total != 1)}")
        in_processes = isinstance(self.launcher, ProcessLauncher)
        with Estimator() if in_processes else nullcontext() as estimator:
            plans = self._planned(jobs)
            later = self._later(plans, at_rates, chosen)
            with ending_at_once():
                from gptattn.sweep.run_sweep import run_sweep

            return run_sweep(
                plans,
                ledger,
                partial(self._launch, ledger),
                in_processes=in_processes,
                estimate=estimator.timing if estimator is not None else None,
                later=later,
                chosen=chosen,
            )

    def _rungs(self) -> list[list[str]]:
        """Return the overrides of each size of the ladder. Raises ConfigError."""
        from gptattn.settings.config import LadderConfig
        from gptattn.settings.values import check_ranges, typed
        from gptattn.sweep.rungs import rungs

        assert self.config is not None
        found = typed(LadderConfig, OmegaConf.to_container(self.config.ladder), "ladder")
        check_ranges(found, "ladder.")
        return rungs(found)

    def _start_clock(self) -> None:
        """Note when the minutes are over. Raises ConfigError if the launcher cannot stop runs."""
        assert self.config is not None
        minutes = self.config.sweep.minutes
        if minutes is None:
            return
        if not isinstance(self.launcher, ProcessLauncher):
            raise ConfigError(
                "sweep.minutes", f"{minutes} needs launcher=processes; leave one of them out"
            )
        self.end = time.monotonic() + 60 * float(minutes)

    def _planned(self, jobs: Jobs, number: int = 0) -> list[Plan]:
        """Return the plans of the jobs, of which the first has this number."""
        from gptattn.cli.planning import common, planned
        from gptattn.machine.console import make_console
        from gptattn.sweep.plan import naming, without_repeats
        from gptattn.sweep.sweep_progress import counted

        assert self.hydra_context is not None
        assert self.config is not None
        loader, config = self.hydra_context.config_loader, self.config
        everything = [job for own in jobs.values() for job in own]
        shared = common(everything)

        def plans() -> Iterator[tuple[int, Plan]]:
            start = number
            for variant, own in jobs.items():
                with naming(variant):
                    for i, plan in planned(loader, config, own, start, shared):
                        yield i, replace(plan, variant=variant)
                start += len(own)

        found = list(counted(plans(), len(everything), "planned", make_console()))
        # Ordered by seed first, so that a sweep that is stopped early has run every variant.
        found.sort(key=lambda numbered: (numbered[1].cfg.seed, numbered[0]))
        in_order = self._settled([plan for _, plan in found])
        # What is an own variant in one block may be another's default: position=rope in Llama's.
        return without_repeats(in_order) if self.variants else in_order

    def _settled(self, plans: Sequence[Plan]) -> list[Plan]:
        """Replace `trainer.precision=auto`."""
        from gptattn.sweep.one_precision import OnePrecision

        assert self.config is not None
        if self.precision is None:
            self.precision = OnePrecision(Path(self.config.hydra.sweep.dir))
        return self.precision.settled(plans)

    def _at_rates(self, jobs: Jobs) -> tuple[Jobs, Jobs]:
        """Return the jobs that tune, and those to compare at each of the rates."""
        from gptattn.sweep.tuning import at_rates, tune_of

        assert self.tune is not None
        if self.uptrain is not None:
            raise ConfigError("hydra.sweeper.tune", "has no place beside uptrain; leave one out")
        tune = tune_of(self.tune)
        both = {variant: at_rates(tune, own) for variant, own in jobs.items()}
        return (
            {variant: first for variant, (first, _) in both.items()},
            {variant: second for variant, (_, second) in both.items()},
        )

    def _later(
        self, first: list[Plan], at_rates: Jobs, chosen: Callable[[list[Plan]], list[Plan]]
    ) -> Later | None:
        """Return the second stage, if there is one; tuning moves the first to its own folder."""
        if self.uptrain is not None:
            return self._uptraining(first)
        if self.tune is None:
            return None
        from gptattn.sweep.tuning import TuneStage, to_tune, tune_of

        later = TuneStage(tune_of(self.tune), self._planned(at_rates, len(first)), chosen)
        first[:] = map(to_tune, first)
        return later

    def _uptraining(self, first: Sequence[Plan]) -> Later:
        from gptattn.cli.jobs import quoted
        from gptattn.cli.planning import planned
        from gptattn.sweep.second_stage import (
            UptrainStage,
            check_first_stage,
            second_stage,
            uptrain_of,
        )

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
            return self._settled([plan for _, plan in plans])

        return UptrainStage(follow)

    def _launch(self, ledger: Ledger, plans: Sequence[Plan]) -> Sequence[JobReturn]:
        from gptattn.cli.jobs import job_of

        assert self.launcher is not None
        assert self.config is not None
        OmegaConf.save(self.config, Path(self.config.hydra.sweep.dir) / "multirun.yaml")
        home = Path(self.config.hydra.sweep.dir)
        size = self.max_batch_size or len(plans)
        returns: list[JobReturn] = []
        for start in range(0, len(plans), size):
            some = plans[start : start + size]
            if isinstance(self.launcher, ProcessLauncher):
                returns += self.launcher.run(some, self.end, ledger)
            else:
                jobs = [job_of(plan, home) for plan in some]
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

    def run(
        self, plans: Sequence[Plan], until: float = math.inf, ledger: Ledger | None = None
    ) -> Sequence[JobReturn]:
        """Like `launch`, for planned runs; for the others see `run_in_processes`."""
        from gptattn.cli.jobs import worker_command
        from gptattn.sweep.run_processes import run_in_processes

        returns = []
        command = partial(worker_command, self.config)
        for plan, result in run_in_processes(plans, command, until, ledger):
            failed = isinstance(result, Exception)
            status = JobStatus.FAILED if failed else JobStatus.COMPLETED
            returns.append(JobReturn(overrides=plan.overrides, _return_value=result, status=status))
        return returns
