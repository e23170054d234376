"""Runs a sweep from end to end: check all runs, skip what is done, run the rest, print failures."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from gptattn.errors import SweepError
from gptattn.machine.console import make_console, span
from gptattn.machine.disk import check_room
from gptattn.runs.folder import RunFolder, begun_below
from gptattn.sweep.checks import Follow, checked, followers
from gptattn.sweep.design import design_words
from gptattn.sweep.end_tables import print_end
from gptattn.sweep.estimate import Estimate
from gptattn.sweep.ledger import Ledger, read_ledger
from gptattn.sweep.plan import (
    Found,
    Plan,
    folders_done,
    slots,
    threads_each,
    with_resumable_folders,
)
from gptattn.sweep.processes import Outcome, Work, run_all
from gptattn.sweep.sweep_progress import SweepProgress

STALE_NAMES = 3  # run names in one line

Launch = Callable[[Sequence[Plan]], Sequence[Any]]


def run_sweep(
    plans: Sequence[Plan],
    folder: Path,
    launch: Launch,
    *,
    in_processes: bool,
    estimate: Estimate | None = None,
    follow: Follow | None = None,
) -> Sequence[Any]:
    """Run all plans that are not done, then the plans of `follow`, which start from their weights.

    `in_processes`: `launch` runs each plan in a process, resumes unfinished runs and keeps the
    ledger itself. `estimate` gives the plans' seconds. Return what `launch` returned. Raises a
    UserError before anything is written if a plan cannot work, and SweepError, after the table of
    failed runs, if runs failed.
    """
    first = checked(plans)
    sweep = first[0].cfg.sweep
    console = make_console()
    ready = partial(_planned, first, folder, in_processes, follow)
    # Without a folder nothing is done yet: plan before the ledger makes the folder, so that an
    # error leaves none behind.
    planned = None if folder.is_dir() else ready()
    with Ledger(folder) as ledger:
        # Look for finished runs under the lock: another sweep may have just added some.
        if planned is None or begun_below(folder):
            planned = ready()
        found, stages = planned
        made, everything = found.done, [*stages[0], *stages[1]]
        _announce(console, folder, everything, found)
        end = _End()
        if len(made) < len(everything):
            stages = [[p for p in stage if p.folder not in made] for stage in stages]
            if estimate is not None:
                stages = _estimated(stages, estimate, console)
            # Not for uptraining: the originals' spread says little about differences to them.
            for line in design_words(first, folder) if follow is None else []:
                console.print(escape(line), soft_wrap=True)
            try:
                _run_stages(stages, launch, ledger, in_processes, end, console)
            except (KeyboardInterrupt, SystemExit, BrokenPipeError):
                finished = len(made) + sum(map(_is_done, [*stages[0], *stages[1]]))
                print(
                    f"stopped: {finished} of {len(everything)} runs are done; "
                    "the same command runs the others",
                    file=sys.stderr,
                )
                raise
            _warn(ledger)
        elif not sweep.fresh:
            console.print("nothing to do; sweep.fresh=true runs them again")
    done = [made.get(p.folder, p.folder) for p in everything if p.folder in made or _is_done(p)]
    print_end(console, done, end.failed)
    if end.failed:
        codes = [_exit_code(path) for path in end.failed]
        lost = (
            f", and {end.skipped} that start from a failed run were skipped" if end.skipped else ""
        )
        raise SweepError(
            f"{len(end.failed)} of {len(everything)} runs failed{lost}; "
            "the same command runs them again",
            next((code for code in codes if code > 0), 1),
        )
    return end.returns


def _planned(
    first: Sequence[Plan], folder: Path, in_processes: bool, follow: Follow | None
) -> tuple[Found, list[list[Plan]]]:
    """Return the existing runs, and the plans of both stages with their final folders.

    Raises a UserError if the second stage cannot work or the disk has no room for the new runs.
    """
    sweep = first[0].cfg.sweep
    found, stages = Found({}, {}), []
    for number in range(2):
        plans = list(first) if number == 0 else []
        if number == 1 and follow is not None:
            plans = followers(stages[0], found.done, follow)
        if not sweep.fresh:
            more = folders_done(
                plans,
                keep_stale=sweep.keep_stale,
                with_weights=number == 0 and follow is not None,
            )
            found.done.update(more.done)
            found.stale.update(more.stale)
            if in_processes:
                plans = with_resumable_folders(plans, found, keep_stale=sweep.keep_stale)
        stages.append(plans)
    # A resumed run already takes its room on the disk.
    new = [p for plans in stages for p in plans if p.folder not in found.done and not p.begun]
    check_room(folder, sum(plan.bytes_on_disk for plan in new))
    return found, stages


def _announce(console: Console, folder: Path, plans: Sequence[Plan], found: Found) -> None:
    """Print how many runs there are, how many are done, and which results are stale and why."""
    known = f", {len(found.done)} already done" if found.done else ""
    begun = sum(plan.begun for plan in plans)
    known += f", {begun} to resume" if begun else ""
    console.print(
        f"[bold]sweep[/bold]  {_counted(len(plans))}{known}, in {escape(str(folder))}",
        soft_wrap=True,
    )
    reasons: dict[str, list[Path]] = {}
    for old, why in found.stale.values():
        reasons.setdefault(why, []).append(old)
    for why, olds in reasons.items():
        names = ", ".join(old.name for old in olds[:STALE_NAMES])
        more = f" and {len(olds) - STALE_NAMES} more" if len(olds) > STALE_NAMES else ""
        again = (
            "a new run is made and the old one kept (sweep.keep_stale=true uses it instead)"
            if len(olds) == 1
            else "new runs are made and the old ones kept (sweep.keep_stale=true uses them instead)"
        )
        console.print(
            f"stale: {names}{more}: {why}; {again}",
            soft_wrap=True,
            markup=False,
        )


def _estimated(
    stages: Sequence[Sequence[Plan]], estimate: Estimate, console: Console
) -> list[list[Plan]]:
    """Return the stages' plans with their expected seconds, if the estimate succeeds."""
    plans = [plan for stage in stages for plan in stage]
    seconds = estimate([plan.cfg for plan in plans])
    if seconds is None:
        return [list(stage) for stage in stages]
    if all(stages):
        console.print(f"about {span(sum(seconds) / slots(plans[0].cfg))} in all")
    each = iter(seconds)
    return [[replace(plan, seconds=next(each)) for plan in stage] for stage in stages]


@dataclass
class _End:
    """The results of a sweep's stages."""

    returns: list[Any] = field(default_factory=list)  # of the launcher
    failed: dict[Path, str] = field(default_factory=dict)  # run folder -> reason
    skipped: int = 0  # second-stage runs whose starting weights were not made


def _run_stages(
    stages: Sequence[Sequence[Plan]],
    launch: Launch,
    ledger: Ledger,
    in_processes: bool,
    end: _End,
    console: Console,
) -> None:
    """Run the first stage's plans, then those of the second whose starting weights exist."""
    for i, stage in enumerate(stages):
        todo = list(stage)
        if i:
            todo = [plan for plan in stage if _has_weights(plan)]
            for plan in stage:
                if plan not in todo:
                    end.skipped += 1
                    reason = f"the run that it starts from is not done: {plan.cfg.init_from}"
                    ledger.note(plan.folder.name, "skipped", reason=reason)
        if not todo:
            continue
        if stages[1]:
            title = ("from scratch", "from the weights of the first")[i]
            console.print(f"[bold]stage {i + 1} of 2[/bold]  {title}")
        returns, failed = _launched(todo, launch, None if in_processes else ledger)
        end.returns += returns
        end.failed |= failed


def _has_weights(plan: Plan) -> bool:
    return plan.cfg.init_from is not None and RunFolder(Path(plan.cfg.init_from)).done


def run_in_processes(
    plans: Sequence[Plan], command: Callable[[Plan], list[str]]
) -> Iterator[tuple[Plan, float | Exception]]:
    """Run each plan in its own process. Yield the plan with its final validation loss or its error.

    A run that ended out of memory is run once more, alone, after all others.
    """
    cfg = plans[0].cfg
    console, parallel, threads = make_console(), min(slots(cfg), len(plans)), threads_each(cfg)
    works = [_work(plan, command, threads) for plan in plans]
    known = [plan.seconds for plan in plans if plan.seconds is not None]
    how = f", {parallel} at a time" if parallel > 1 else ", one after the other"
    how = how if len(plans) > 1 else ""
    about = (
        f": about {span(sum(known) / parallel)}"
        if len(known) == len(plans)
        else "; no time estimate: the trial failed"
    )
    console.print(f"{len(plans)} to run{how}{about}")
    ledger = Ledger(plans[0].folder.parent)
    with SweepProgress(console, works, parallel, known=len(known) == len(plans)) as progress:
        outcomes = run_all(works, parallel, ledger, progress)
        short = [
            i
            for i, plan in enumerate(plans)
            if outcomes[i].out_of_memory and _can_start_again(plan)
        ]
        again = [_work(plans[i], command, threads) for i in short]
        progress.retrying(again)
        for i, outcome in zip(short, run_all(again, 1, ledger, progress), strict=True):
            outcomes[i] = outcome
    _warn(ledger)
    for plan, outcome in zip(plans, outcomes, strict=True):
        yield plan, _loss(outcome) if outcome.done else RuntimeError(outcome.reason)


def _can_start_again(plan: Plan) -> bool:
    """Whether the plan can start again in its folder: without checkpoints, a begun run cannot."""
    return plan.cfg.checkpoint or not plan.begun


def _work(plan: Plan, command: Callable[[Plan], list[str]], threads: int | None) -> Work:
    # A resumed run must keep its number of threads.
    own = [] if threads is None or plan.begun else [f"trainer.threads={threads}"]
    return Work(plan.folder, [*command(plan), *own], plan.overrides, plan.seconds or 1.0)


def _loss(outcome: Outcome) -> float | Exception:
    loss = RunFolder(outcome.folder).final_loss()
    return RuntimeError("its summary.json has no loss") if loss is None else loss


def _launched(
    todo: Sequence[Plan], launch: Launch, ledger: Ledger | None
) -> tuple[Sequence[Any], dict[Path, str]]:
    """Return the launcher's return values, and run folder -> reason for the runs not done."""
    if ledger is not None:
        for plan in todo:
            ledger.note(plan.folder.name, "submitted", overrides=plan.overrides)
    returns: Sequence[Any] = []
    reason = "left no summary.json"
    try:
        returns = launch(todo)
    except Exception as error:  # of the launcher itself; some runs may be done all the same
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    failed = {}
    for i, plan in enumerate(todo):
        result = getattr(returns[i], "_return_value", None) if i < len(returns) else None
        why = "" if _is_done(plan) else str(result) if isinstance(result, Exception) else reason
        if why:
            failed[plan.folder] = why
        if ledger is not None:
            facts = {"reason": why} if why else {}
            ledger.note(plan.folder.name, "failed" if why else "done", **facts)
    return returns, failed


def _warn(ledger: Ledger) -> None:
    if ledger.unwritten is not None:
        print(f"warning: could not write to the ledger: {ledger.unwritten}", file=sys.stderr)


def _counted(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs:,} runs"


def _is_done(plan: Plan) -> bool:
    return RunFolder(plan.folder).done


def _exit_code(folder: Path) -> int:
    """Return the exit code of the run's newest failure in the ledger; 1 if it has none."""
    ends = [
        entry.get("exit")
        for entry in read_ledger(folder.parent)
        if entry.get("run") == folder.name and entry.get("state") == "failed"
    ]
    return ends[-1] if ends and isinstance(ends[-1], int) else 1
