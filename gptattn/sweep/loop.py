"""Runs a sweep in one loop: plan, launch, read the results, plan the next stage.

`plan_stages` yields the stages: a plain grid has one; `tune` adds one before it, `until` one after.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig

from gptattn.errors import SweepError, UserError
from gptattn.machine.disk import check_room, expand_path
from gptattn.machine.lock import hold_lock
from gptattn.runs.folder import RunFolder
from gptattn.runs.planned_runs import SWEEP_LOCK, write_planned
from gptattn.runs.two_stages import variant_key
from gptattn.settings.layers import quote
from gptattn.sweep.jobs import Job, list_jobs
from gptattn.sweep.plan import DIVERGED, Plan, find_runs, plan_jobs
from gptattn.sweep.progress import print_end, print_plan, print_refused
from gptattn.sweep.stages import Results, Stage, Stages, share_machine
from gptattn.sweep.tuning import SEED, Tune, read_tune, set_rate, tune_stage
from gptattn.sweep.until import Until


def run_sweep(
    loader: ConfigLoader, config: DictConfig, launcher: Any, sweeper: Any, arguments: Sequence[str]
) -> None:
    """Run a sweep from its command line to its final table.

    `sweeper` has `variants` and `tune`. Raises a UserError before anything is written if no run is
    valid, and SweepError at the end if some were refused or failed.
    """
    home = Path("outputs", str(config.experiment_name))
    if config.hydra.sweep.dir != ".":
        home = expand_path(str(config.hydra.sweep.dir), "hydra.sweep.dir")
        # In launchers and for each job, Hydra makes the folder as typed.
        config.hydra.sweep.dir = str(home)
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quote(str(home))}")
    ours = config.hydra.runtime.choices["hydra/launcher"] == "processes"
    tune = None if sweeper.tune is None else read_tune(sweeper.tune)
    jobs = list_jobs(loader, arguments, sweeper.variants)
    print(f"planning {len(jobs):,} run{'s' * (len(jobs) != 1)}", flush=True)

    refused: dict[str, UserError] = {}
    plan = partial(plan_jobs, loader, config, refused)
    stages = plan_stages(home, jobs, plan, tune, config.sweep.until)
    first = next(stages)  # this has checked all runs that can follow
    print_refused(refused)
    busy = f"another process is running a sweep in {home}; wait for it, or give another "
    share = share_machine([plan.cfg for plan in first.plans]) if ours else (None, None)
    launch = partial(_launch, *share, launcher)
    with hold_lock(home / SWEEP_LOCK, "hydra.sweep.dir", f"{busy}experiment_name"):
        # Other launchers' runs were on other machines.
        measures = [*config.allow_targets] if ours and config.sweep.speed else None
        try:
            run_stages(first, stages, home, config, launch, measures)
        finally:
            print_refused(refused)
    for error in refused.values():
        raise SweepError("some runs were refused; fix the errors above", error.exit_code)


def plan_stages(
    home: Path,
    jobs: Sequence[Job],
    plan: Callable[[Sequence[Job], Path], list[Plan]],
    tune: Tune | None,
    half_width: float | None,
) -> Stages:
    """Yield the stages of a sweep, each once the results of the one before are known."""
    plans = plan(jobs if tune is None else set_rate(jobs, tune.lr[0]), home)
    until = None if half_width is None else Until(home, plans)
    title, code = "", 0
    if tune is not None:
        plans, code = yield from tune_stage(tune, plans, plan, home)
        title = "stage 2  each variant at its best learning rate"
    results = (yield Stage(plans, title)) if plans else {}
    if until is not None and (later := until.decide(plans, results, tune and tune.seed)):
        seedless = dict.fromkeys(
            tuple(o for o in one.overrides if not SEED.match(o)) for one in plans
        )
        seeds = max(later.values(), key=len)
        more = plan([Job([*own, f"seed={seed}"]) for own in seedless for seed in seeds], home)
        yield Stage(
            [one for one in more if one.cfg.seed in later.get(variant_key(asdict(one.cfg)), ())]
        )
    return code


def run_stages(
    stage: Stage | None,
    stages: Stages,
    home: Path,
    config: DictConfig,
    launch: Callable[[Sequence[Plan]], str],
    measures: Sequence[str] | None,
) -> None:
    """Launch the unfinished runs of each stage, and send the results back to get the next.

    `measures`: as in `print_end`, which then measures speeds.
    """
    planned: set[Path] = set()  # folders of the runs of all stages so far
    done: list[Path] = []  # of stages that count
    failed: dict[Path, str] = {}
    codes: list[int] = []
    try:
        while stage is not None:
            found = find_runs(stage.plans)
            # In a tuning stage, a run that diverged is a result: it rules out its rate.
            results: Results = {**found.done}
            if not stage.counts:
                results |= dict.fromkeys(found.diverged)
            todo = {
                plan.folder: replace(plan, folder=found.begun.get(plan.folder, plan.folder))
                for plan in stage.plans
                if plan.folder not in results
            }
            planned |= {*found.done.values(), *(plan.folder for plan in todo.values())}
            if stage.title:
                print(stage.title)
            print_plan(home, len(stage.plans), len(results), found)
            why = ""
            if todo:
                new = [plan for plan in todo.values() if not RunFolder(plan.folder).begun]
                check_room(home, sum(plan.bytes_on_disk for plan in new))
                write_planned(home, sorted(str(folder.relative_to(home)) for folder in planned))
                why = launch([*todo.values()])
            else:
                print("nothing left to run; to run again, add sweep.fresh=true")
            for folder, plan in todo.items():
                run = RunFolder(plan.folder)
                failure = run.read_failure() or {"exit": 1, "error": why}
                if run.done:
                    results[folder] = run.path
                elif failure.get("exit") == DIVERGED and not stage.counts:
                    results[folder] = None
                else:
                    failed[run.path] = str(failure.get("error"))
                    codes.append(int(failure.get("exit") or 1))
            if stage.counts:
                done += [run for run in results.values() if run is not None]
            try:
                stage = stages.send(results)
            except StopIteration as end:
                codes += [end.value] if end.value else []
                stage = None
    except (KeyboardInterrupt, SystemExit, BrokenPipeError):
        count = f"{sum(RunFolder(run).done for run in planned)} of {len(planned)} runs are done"
        print(f"stopped: {count}; to run the others, repeat the command", file=sys.stderr)
        raise
    print_end(done, failed, measures)
    if failed:
        count = f"{len(failed)} of {len(planned)} runs failed"
        raise SweepError(f"{count}; to retry them, repeat the command", codes[0])
    if codes:
        raise SweepError("a variant diverged at all rates; lower hydra.sweeper.tune.lr", codes[0])


def _launch(
    slots: int | None,
    threads: int | None,
    launcher: Any,
    plans: Sequence[Plan],
) -> str:
    """Start the plans' runs through Hydra's launcher, and wait for them.

    `slots`: how many at a time; None: the launcher decides. `threads` of each run; None: from its
    settings. Return the reason to report for a run that left no files: some launchers raise when
    one of their processes is killed.
    """
    how = ""
    if slots is not None:
        slots = min(slots, len(plans))
        launcher.slots = slots
        how = f", {slots} at a time" if slots > 1 else ", one after the other" * (len(plans) > 1)
    print(f"{len(plans)} to run{how}", flush=True)
    commands = []
    for plan in plans:
        folder = quote(str(plan.folder))
        if RunFolder(plan.folder).begun:
            # A run's record cannot allow targets: pass `allow_targets` again.
            own = [f"resume={folder}", f"allow_targets=[{','.join(plan.cfg.allow_targets)}]"]
        else:
            own = [*plan.overrides, f"run_dir={folder}"]
            # `++` means that nobody typed it: a single run chooses its kernels and has all threads.
            if plan.provenance.device == "cuda":  # otherwise it can run on a GPU, and chooses there
                names = [quote(str(kind.attn.get("backend"))) for kind in plan.cfg.kinds()]
                own += [f"++compile={str(plan.cfg.compile).lower()}"]
                own += [f"++sweep.backends=[{','.join(names)}]"]
            own += [f"++trainer.threads={threads}"] if threads is not None else []
        own += ["sweep.beside_others=true"] if slots is not None and slots > 1 else []
        commands.append(own)
    try:
        launcher.launch(commands, initial_job_idx=0)
    except Exception as error:  # of the launcher itself; some runs can be done all the same
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "left no summary.json"
