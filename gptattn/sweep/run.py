"""A sweep from end to end: check all runs, skip what is done, run the rest, say what failed."""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gptattn.config import check
from gptattn.console import make_console
from gptattn.errors import ConfigError, RunFolderError, SweepError
from gptattn.precheck import prepared
from gptattn.sweep.estimate import expected_seconds
from gptattn.sweep.ledger import Ledger, read_ledger
from gptattn.sweep.plan import Plan, settings_key, slots, split_done, threads_each
from gptattn.sweep.processes import LOG, Outcome, Work, run_all
from gptattn.sweep.progress import SweepProgress, span

Launch = Callable[[Sequence[Plan]], Sequence[Any]]


def run_sweep(
    plans: Sequence[Plan], folder: Path, launch: Launch, *, in_processes: bool
) -> Sequence[Any]:
    """Run all plans that are not done. `in_processes`: the launcher keeps the ledger itself.

    Raises a UserError before anything has been written where a plan cannot work, and SweepError,
    after the table of what failed, where runs failed.
    """
    plans = _checked(plans)
    fresh = plans[0].cfg.sweep.fresh
    done, todo = ([], list(plans)) if fresh else split_done(plans)
    console = make_console()
    known = f", {len(done)} of them done already" if done else ""
    console.print(f"[bold]sweep[/bold]  {_counted(len(plans))}{known}, in {folder}", soft_wrap=True)
    returns: Sequence[Any] = []
    failed: dict[Path, str] = {}
    if todo:
        with Ledger(folder) as ledger:
            try:
                returns, failed = _launched(todo, launch, None if in_processes else ledger)
            except (KeyboardInterrupt, SystemExit):
                finished = len(done) + sum(map(_is_done, todo))
                print(
                    f"stopped: {finished} of {len(plans)} runs are done; "
                    "the same command runs the others",
                    file=sys.stderr,
                )
                raise
            _warn(ledger)
    elif not fresh:
        console.print("nothing to do; sweep.fresh=true runs them again")
    _print_end(console, [*done, *(plan.folder for plan in todo if _is_done(plan))], failed)
    if failed:
        codes = [_exit_code(path) for path in failed]
        raise SweepError(
            f"{len(failed)} of {len(plans)} runs failed; the same command runs them again",
            next((code for code in codes if code > 0), 1),
        )
    return returns


def run_in_processes(
    plans: Sequence[Plan], command: Callable[[Plan], list[str]]
) -> Iterator[tuple[Plan, float | Exception]]:
    """Run each plan in its own process. Yields its final validation loss, or what ended it."""
    cfg = plans[0].cfg
    console, at_once, threads = make_console(), slots(cfg), threads_each(cfg)
    seconds = expected_seconds([plan.cfg for plan in plans])
    works = [
        Work(plan.folder, [*command(plan), *_threads(threads)], plan.overrides, weight)
        for plan, weight in zip(plans, seconds, strict=True)
    ]
    at_once = min(at_once, len(plans))
    how = f", {at_once} at a time" if at_once > 1 else ", one after the other"
    how = how if len(plans) > 1 else ""
    console.print(f"{len(plans)} to run{how}: about {span(sum(seconds) / at_once)}")
    ledger = Ledger(plans[0].folder.parent)
    with SweepProgress(console, works, at_once) as progress:
        outcomes = run_all(works, at_once, ledger, progress)
    _warn(ledger)
    for plan, outcome in zip(plans, outcomes, strict=True):
        yield plan, _loss(outcome) if outcome.done else RuntimeError(outcome.reason)


def _threads(threads: int | None) -> list[str]:
    return [] if threads is None else [f"trainer.threads={threads}"]


def _loss(outcome: Outcome) -> float:
    summary = json.loads((outcome.folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["metrics"]["val/loss"])


def _checked(plans: Sequence[Plan]) -> list[Plan]:
    """The plans with what `match` makes of them. Raises a UserError for the first that is wrong."""
    twice = [folder for folder, n in Counter(plan.folder for plan in plans).items() if n > 1]
    if twice:
        raise ConfigError(
            "hydra.sweep.subdir", f"gives several runs one folder, {twice[0]}; leave it out"
        )
    known: dict[str, Any] = {}
    ready = []
    for plan in plans:
        check(plan.cfg)
        slots(plan.cfg)
        if (plan.folder / "config.yaml").exists():
            raise RunFolderError("hydra.sweep.subdir", f"{plan.folder} already holds a run")
        # Seeds share model and data: the slow checks are made once for all of them.
        key = settings_key(asdict(replace(plan.cfg, seed=0)))
        if key not in known:
            known[key] = prepared(plan.cfg)
        ready.append(replace(plan, cfg=replace(known[key], seed=plan.cfg.seed)))
    return ready


def _launched(
    todo: Sequence[Plan], launch: Launch, ledger: Ledger | None
) -> tuple[Sequence[Any], dict[Path, str]]:
    """What the launcher returned, and why which runs are not done."""
    if ledger is not None:
        for plan in todo:
            ledger.note(plan.folder.name, "submitted", overrides=plan.overrides)
    returns: Sequence[Any] = []
    reason = "left no summary.json"
    try:
        returns = launch(todo)
    except Exception as error:  # of the launcher itself: what has run has run
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
        print(f"warning: the ledger lacks lines: {ledger.unwritten}", file=sys.stderr)


def _counted(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def _is_done(plan: Plan) -> bool:
    return (plan.folder / "summary.json").is_file()


def _exit_code(folder: Path) -> int:
    """What the ledger says of the newest end of this run; 1 where it does not know."""
    ends = [
        entry.get("exit")
        for entry in read_ledger(folder.parent)
        if entry.get("run") == folder.name and entry.get("state") == "failed"
    ]
    return ends[-1] if ends and isinstance(ends[-1], int) else 1


def _print_end(console: Console, done: Sequence[Path], failed: dict[Path, str]) -> None:
    from gptattn.compare.runs import read_runs
    from gptattn.compare.table import terminal_table

    if done:
        console.print(terminal_table(read_runs(done)[0], _counted(len(done)), console.width))
        homes = sorted({str(path.parent) for path in done})
        folders = " ".join(map(shlex.quote, homes))
        console.print(f"report: python scripts/compare.py {folders}", soft_wrap=True)
    if failed:
        table = Table(title="failed", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("run", overflow="fold")
        table.add_column("why", overflow="fold")
        for path, why in failed.items():
            log = f"\n{path / LOG}" if (path / LOG).is_file() else ""
            table.add_row(Text(path.name), Text(why + log))
        console.print(table)
