"""Runs a sweep from end to end: check all runs, skip what is done, run the rest, print failures."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from gptattn.errors import ConfigError, SweepError, UserError
from gptattn.machine.console import make_console
from gptattn.runs.folder import begun_below
from gptattn.runs.sweep_states import read_ledger
from gptattn.sweep.checks import check_shared, checked
from gptattn.sweep.design import design_words
from gptattn.sweep.end_tables import print_end
from gptattn.sweep.estimate import Estimate
from gptattn.sweep.expected import expect
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import DIVERGED, Plan
from gptattn.sweep.processes import TimeOver
from gptattn.sweep.replaced import mark_replaced
from gptattn.sweep.stages import DIVERGED_EVERYWHERE, Later, Stages, is_done, stages_of

STALE_NAMES = 3  # run names in one line

Launch = Callable[[Sequence[Plan]], Sequence[Any]]


@dataclass(frozen=True)
class Swept:
    """How a sweep ended."""

    returned: Sequence[Any]  # by the launcher
    results: list[tuple[Plan, Path]]  # the plans that are done, with the folders of their results
    complete: bool  # false: its minutes were over first
    error: SweepError | None = None  # on runs that failed

    def returns(self) -> Sequence[Any]:
        """Return what the launcher returned. Raises SweepError if runs failed."""
        if self.error is not None:
            raise self.error
        return self.returned


def run_sweep(
    plans: Sequence[Plan],
    ledger: Ledger,
    launch: Launch,
    *,
    in_processes: bool,
    estimate: Estimate | None = None,
    later: Later | None = None,
    chosen: Callable[[list[Plan]], list[Plan]] = list,
) -> Swept:
    """Run all plans that are not done, then those of the second stage, `later`.

    Of the checked plans those run that `chosen` returns, if the first stage's are results.
    `in_processes`: `launch` runs each plan in a process, resumes unfinished runs and keeps the
    ledger itself. `estimate` gives the plans' seconds. After TimeOver, a line says how far the
    sweep came. If runs failed, a table of them is printed. Raises a UserError before anything is
    written if a plan cannot work.
    """
    folder = ledger.folder
    first = checked(plans)
    first = chosen(first) if later is None else first
    sweep = first[0].cfg.sweep
    if sweep.vectorize is not None and not in_processes:
        raise ConfigError(
            "sweep.vectorize", f"{sweep.vectorize} needs launcher=processes; leave one of them out"
        )
    if ledger.shared:
        check_shared(first, in_processes)
    console = make_console()
    ready = partial(stages_of, first, ledger, in_processes, later)
    # Without a folder nothing is done yet: plan before the ledger makes the folder, so that an
    # error leaves none behind.
    stages = None if folder.is_dir() else ready()
    with ledger:
        # Look for finished runs under the lock: another sweep may have just added some.
        if stages is None or ledger.shared or begun_below(folder):
            stages = ready()
        _announce(console, folder, stages)
        end = _End()
        if stages.todo(stages.everything):
            if estimate is not None:
                expect(stages, estimate, ledger, console)
            for line in _design(stages, later, folder):
                console.print(escape(line), soft_wrap=True)
            try:
                _run_stages(stages, later, launch, ledger, in_processes, end, console)
            except TimeOver:
                over = f"{sweep.minutes:g} minute{'s are' if sweep.minutes != 1 else ' is'} over"
                print(f"{over}: {_how_far(stages)}; the same command goes on", file=sys.stderr)
                return Swept(end.returns, [], complete=False)
            except (KeyboardInterrupt, SystemExit, BrokenPipeError):
                print(
                    f"stopped: {_how_far(stages)}; the same command runs the others",
                    file=sys.stderr,
                )
                raise
            ledger.warn_unwritten()
        elif not sweep.fresh:
            console.print("nothing to do; sweep.fresh=true runs them again")
            if later is not None and not later.first_counts:
                _mark_replaced(stages.second, console)
    made = stages.made
    results = [(p, made[p.folder]) for p in _results(stages, later) if p.folder in made]
    print_end(console, [folder for _, folder in results], end.failed)
    lost = end.failed or end.skipped or end.diverged
    error = _sweep_error(end, len(stages.everything), later) if lost else None
    return Swept(end.returns, results, complete=True, error=error)


def _design(stages: Stages, later: Later | None, folder: Path) -> list[str]:
    """Return what the seeds can show, unless `sweep.until` sees to it.

    Of uptraining the originals' spread would say little.
    """
    decided = stages.first[0].cfg.sweep.until is not None or (later and later.first_counts)
    return [] if decided else design_words(_results(stages, later), folder)


def _results(stages: Stages, later: Later | None) -> list[Plan]:
    """Return the plans whose runs are results."""
    return stages.everything if later is None or later.first_counts else stages.second


def _how_far(stages: Stages) -> str:
    return f"{stages.ended()} of {len(stages.everything)} runs are done"


def _sweep_error(end: "_End", runs: int, later: Later | None) -> SweepError:
    codes = [_exit_code(path) for path in end.failed] + [DIVERGED] * bool(end.diverged)
    failed = f"{len(end.failed)} of {runs} runs failed" if end.failed else ""
    skipped = (
        f"{end.skipped} {later.lost} {'was' if end.skipped == 1 else 'were'} skipped"
        if later is not None and end.skipped
        else ""
    )
    both = ", and ".join(filter(None, [failed, skipped]))
    again = "; the same command runs them again" if failed else ""
    diverged = (
        f"{end.diverged} variant{'s' * (end.diverged > 1)} diverged at every learning rate; "
        "give lower rates"
    )
    message = "; ".join(filter(None, [f"{both}{again}", diverged * bool(end.diverged)]))
    return SweepError(message, next((code for code in codes if code > 0), 1))


def _announce(console: Console, folder: Path, stages: Stages) -> None:
    """Print how many runs there are, how many are done, and which results are stale and why."""
    plans = stages.everything
    done = stages.ended()
    known = f", {done} already done" if done else ""
    begun = sum(plan.begun for plan in plans)
    known += f", {begun} to resume" if begun else ""
    console.print(
        f"[bold]sweep[/bold]  {_counted(len(plans))}{known}, in {escape(str(folder))}",
        soft_wrap=True,
    )
    reasons: dict[str, list[Path]] = {}
    stale = stages.found.stale
    for old, why in (stale[plan.folder] for plan in plans if plan.folder in stale):
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


@dataclass
class _End:
    """The results of a sweep's stages."""

    returns: list[Any] = field(default_factory=list)  # of the launcher
    failed: dict[Path, str] = field(default_factory=dict)  # run folder -> reason
    skipped: int = 0  # second-stage runs that wait for a run that is not done
    diverged: int = 0  # variants that have no second stage: no rate was low enough


def _run_stages(
    stages: Stages,
    later: Later | None,
    launch: Launch,
    ledger: Ledger,
    in_processes: bool,
    end: _End,
    console: Console,
) -> None:
    """Run the first stage's plans, then those that the second stage chooses."""

    def run(number: int, plans: Sequence[Plan]) -> None:
        if not plans:
            return
        if stages.second:
            assert later is not None
            console.print(f"[bold]stage {number + 1} of 2[/bold]  {later.titles[number]}")
        returns, failed = _launched(plans, launch, not in_processes)
        end.returns += returns
        end.failed |= failed

    run(0, stages.todo(stages.first))
    if later is None:
        return
    if not later.first_counts:
        diverged = {folder for folder in end.failed if _exit_code(folder) == DIVERGED}
        stages.lost |= diverged
        end.failed = {f: why for f, why in end.failed.items() if f not in diverged}
    chosen = later.chosen(stages)
    for line in chosen.lines:
        console.print(line, markup=False, soft_wrap=True)
    if not later.first_counts:
        _mark_replaced(chosen.plans, console)
    for folder, reason in chosen.skipped.items():
        ledger.note(folder.name, "skipped", reason=reason)
    for reason, count in Counter(chosen.skipped.values()).items():
        if not later.first_counts:
            console.print(f"skipped: {_counted(count)}: {reason}", markup=False, soft_wrap=True)
    end.skipped = sum(why != DIVERGED_EVERYWHERE for why in chosen.skipped.values())
    end.diverged = chosen.diverged
    skipped = [plan for plan in stages.second if plan.folder in chosen.skipped]
    stages.second = [*chosen.plans, *skipped]
    run(1, stages.todo(chosen.plans))


def _mark_replaced(chosen: Sequence[Plan], console: Console) -> None:
    if count := mark_replaced(chosen):
        console.print(
            f"replaced: {_counted(count)} at a learning rate that is no longer the best; "
            "reports leave them out",
            soft_wrap=True,
        )


def _launched(
    todo: Sequence[Plan], launch: Launch, noted: bool
) -> tuple[Sequence[Any], dict[Path, str]]:
    """Return the launcher's return values, and run folder -> reason for the runs not done.

    `noted`: keep the ledger for the launcher.
    """
    home = todo[0].folder.parent
    ledger = Ledger(home) if noted else None
    if ledger is not None:
        home.mkdir(exist_ok=True)
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
        why = "" if is_done(plan) else str(result) if isinstance(result, Exception) else reason
        if why:
            failed[plan.folder] = why
        if ledger is not None:
            facts = {"reason": why, **_exit_of(result)} if why else {}
            ledger.note(plan.folder.name, "failed" if why else "done", **facts)
    return returns, failed


def _exit_of(result: object) -> dict[str, int]:
    return {"exit": result.exit_code} if isinstance(result, UserError) else {}


def _counted(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs:,} runs"


def _exit_code(folder: Path) -> int:
    """Return the exit code of the run's newest failure in the ledger; 1 if it has none."""
    ends = [
        entry.get("exit")
        for entry in read_ledger(folder.parent)
        if entry.get("run") == folder.name and entry.get("state") == "failed"
    ]
    return ends[-1] if ends and isinstance(ends[-1], int) else 1
