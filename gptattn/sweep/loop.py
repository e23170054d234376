"""A sweep is one loop: plan, launch, read the results, ask what comes next, launch again.

What comes next is said by a generator of stages: a plain grid has one, `sweep/tuning.py` and
`sweep/until.py` have two and more.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from rich.console import Console
from rich.markup import escape

from gptattn.errors import NumericError, SweepError
from gptattn.machine.console import make_console
from gptattn.machine.disk import check_room
from gptattn.machine.lock import locked
from gptattn.runs.folder import RunFolder
from gptattn.runs.sweep_states import SWEEP_LOCK, write_planned
from gptattn.settings.compose import quoted
from gptattn.settings.config import LadderConfig
from gptattn.settings.values import check_values
from gptattn.sweep.design import design_words
from gptattn.sweep.end_tables import print_end
from gptattn.sweep.jobs import Jobs, jobs_of
from gptattn.sweep.launcher import TimeOver
from gptattn.sweep.plan import Found, Plan, check_plans, find_runs, plan_jobs
from gptattn.sweep.rungs import rungs
from gptattn.sweep.stages import Among, PlanJobs, Results, Stage, Stages, share_machine
from gptattn.sweep.tuning import tune_stages
from gptattn.sweep.until import until_stages

STALE_NAMES = 3  # run names in one line


def run_sweep(
    loader: ConfigLoader, config: DictConfig, launcher: Any, sweeper: Any, arguments: Sequence[str]
) -> None:
    """Run a sweep from its command line to its end table.

    `sweeper` has `variants` and `tune`. Raises a UserError before anything is written if a run
    cannot work, and SweepError if runs failed.
    """
    console = make_console()
    home = Path("outputs", str(config.experiment_name))
    if config.hydra.sweep.dir != ".":
        home = Path(config.hydra.sweep.dir)
    ladder: Any = OmegaConf.to_object(config.ladder)
    assert isinstance(ladder, LadderConfig)
    check_values(ladder, "ladder.")
    jobs = jobs_of(loader, arguments, sweeper.variants, rungs(ladder))
    total = sum(map(len, jobs.values()))
    console.print(f"planning {total:,} run{'s' * (total != 1)}")

    def plan(some: Jobs) -> list[Plan]:
        return check_plans(plan_jobs(loader, config, some, home))

    def kind(some: Jobs, among: Among = list) -> Stages:
        if sweeper.tune is not None:
            return tune_stages(sweeper.tune, some, plan, among)
        return _grid(some, plan, among)

    stages = kind(jobs)
    if config.sweep.until is not None:
        stages = until_stages(home, jobs, kind, sweeper.tune)
    busy = f"another process is running a sweep in {home}; wait for it, or give this one another "
    with closing(stages):
        stage = next(stages)  # all runs that may follow are checked by now
        with locked(home / SWEEP_LOCK, "hydra.sweep.dir", f"{busy}experiment_name"):
            _run_stages(stage, stages, config, launcher, sweeper, home, console)


def _grid(jobs: Jobs, plan: PlanJobs, among: Among) -> Stages:
    yield Stage(among(plan(jobs)))
    return []


def _run_stages(
    stage: Stage | None,
    stages: Stages,
    config: DictConfig,
    launcher: Any,
    sweeper: Any,
    home: Path,
    console: Console,
) -> None:
    begun, why = time.monotonic(), ""
    designed = False
    done: dict[Path, Path] = {}  # of stages that count
    failed: dict[Path, str] = {}
    codes: list[int] = []
    planned: set[Path] = set()  # where the runs of all stages so far are, or will be
    answered = 0  # runs that need not be made: an equal one diverged
    minutes = config.sweep.minutes
    until = None if minutes is None else begun + 60 * float(minutes)
    while stage is not None:
        for line in stage.lines:
            console.print(line, markup=False, soft_wrap=True)
        found = find_runs(stage.plans)
        if stage.counts:  # one that diverged has failed, and is made again
            found.diverged.clear()
        plans = [replace(p, folder=found.begun.get(p.folder, p.folder)) for p in stage.plans]
        todo = [p for p in plans if p.folder not in found.done and p.folder not in found.diverged]
        _announce(console, home, stage, found)
        check_room(home, sum(plan.bytes_on_disk for plan in todo if not plan.begun))
        planned |= {found.done.get(plan.folder, plan.folder) for plan in plans}
        answered += len(found.diverged)
        if todo:
            if not designed and stage.counts and config.sweep.until is None:
                for line in design_words(stage.plans, home):
                    console.print(escape(line), soft_wrap=True)
                designed = True
            home.mkdir(parents=True, exist_ok=True)
            write_planned(home, [str(plan.folder.relative_to(home)) for plan in plans])
            try:
                why = _launch(todo, config, launcher, sweeper.max_batch_size, console, until)
            except TimeOver:
                print(
                    f"{minutes:g} minute{'s are' if minutes != 1 else ' is'} over: "
                    f"{_how_far(planned, answered)}; the same command goes on",
                    file=sys.stderr,
                )
                return
            except (KeyboardInterrupt, SystemExit, BrokenPipeError):
                print(
                    f"stopped: {_how_far(planned, answered)}; the same command runs the others",
                    file=sys.stderr,
                )
                raise
        elif not plans[0].cfg.sweep.fresh:
            console.print("nothing to do; sweep.fresh=true runs them again")
        results = Results(dict(found.done), diverged=set(found.diverged))
        for before, plan in zip(stage.plans, plans, strict=True):
            run = RunFolder(plan.folder)
            if plan.folder in results.done or plan.folder in results.diverged:
                continue
            if run.done:
                results.done[before.folder] = run.path
                continue
            failure = run.read_failure() or {"exit": 1, "error": why}
            results.failed[run.path] = str(failure.get("error"))
            codes.append(int(failure.get("exit") or 1))
            if codes[-1] == NumericError.exit_code:
                results.diverged.add(before.folder)
                if not stage.counts:  # an answer too
                    codes.pop()
                    del results.failed[run.path]
        done |= results.done if stage.counts else {}
        failed |= results.failed
        try:
            stage = stages.send(results)
        except StopIteration as end:
            codes += end.value
            stage = None
    print_end(console, list(done.values()), failed)
    if codes:
        runs = (
            f"{len(failed)} of {len(planned)} runs failed"
            if failed
            else "no learning rate is known"
        )
        raise SweepError(f"{runs}; the same command runs them again", next(filter(None, codes), 1))


def _how_far(planned: set[Path], answered: int) -> str:
    done = answered + sum(RunFolder(folder).done for folder in planned)
    return f"{done} of {len(planned)} runs are done"


def _announce(console: Console, home: Path, stage: Stage, found: Found) -> None:
    """Print how many runs there are, how many are done, and which results are stale and why."""
    if stage.title:
        console.print(f"[bold]{stage.title}[/bold]")
    runs, over = len(stage.plans), len(found.done) + len(found.diverged)
    known = f", {over} already done" if over else ""
    known += f", {len(found.begun)} to resume" if found.begun else ""
    counted = "1 run" if runs == 1 else f"{runs:,} runs"
    console.print(f"[bold]sweep[/bold]  {counted}{known}, in {escape(str(home))}", soft_wrap=True)
    reasons: dict[str, list[str]] = {}
    for old, why in found.stale.values():
        reasons.setdefault(why, []).append(old.name)
    for why, olds in reasons.items():
        names = ", ".join(olds[:STALE_NAMES])
        more = f" and {len(olds) - STALE_NAMES} more" if len(olds) > STALE_NAMES else ""
        again = "a new run is made and the old one kept (sweep.keep_stale=true uses it instead)"
        if len(olds) > 1:
            again = (
                "new runs are made and the old ones kept (sweep.keep_stale=true uses them instead)"
            )
        console.print(f"stale: {names}{more}: {why}; {again}", soft_wrap=True, markup=False)


def _launch(
    plans: Sequence[Plan],
    config: DictConfig,
    launcher: Any,
    max_batch_size: int | None,
    console: Console,
    until: float | None,
) -> str:
    """Start the plans' runs through Hydra's launcher, whichever it is, and wait for them.

    `until`: `time.monotonic()` when the sweep's minutes are over. Return why a run may have left
    nothing behind: some launchers raise when one of their processes is killed.
    """
    jobs, threads = share_machine([plan.cfg for plan in plans])
    how = f", {jobs} at a time" if jobs > 1 else ", one after the other" * (len(plans) > 1)
    console.print(f"{len(plans)} to run{how}")
    _set(config, "jobs", jobs)
    commands = []
    for plan in plans:
        folder = quoted(str(plan.folder))
        if plan.begun:  # the `allow_targets` in a run's record does not count: pass it again
            own = [f"resume={folder}", f"allow_targets=[{','.join(plan.cfg.allow_targets)}]"]
        else:
            own = [*plan.overrides, f"run_dir={folder}"]
            own += [f"trainer.threads={threads}"] if threads is not None else []
        own += ["sweep.beside_others=true"] if jobs > 1 else []
        commands.append(own)
    size = max_batch_size or len(commands)
    why = "left no summary.json"
    for start in range(0, len(commands), size):
        if until is not None:
            _set(config, "minutes", max(0.0, until - time.monotonic()) / 60)
        try:
            launcher.launch(commands[start : start + size], initial_job_idx=start)
        except Exception as error:  # of the launcher itself; some runs may be done all the same
            why = f"{type(error).__name__}: {error}".splitlines()[0]
    return why


def _set(config: DictConfig, name: str, value: Any) -> None:
    """Set a value of the sweep's config for its launcher."""
    with read_write(config), open_dict(config):
        config.sweep[name] = value
