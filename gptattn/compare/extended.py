"""Handles extended runs: `resume=FOLDER budget.steps=...` after their budget had ended."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gptattn.compare.curves import budget_ends
from gptattn.compare.finished_runs import Completed, Run, finite, one_line
from gptattn.settings.identity import at_step, budget_words


def at_first_budgets(runs: Sequence[Run]) -> tuple[list[Run], dict[Path, str]]:
    """Return each run as it was when its first budget ended, and a note on each extended run.

    At that step the schedule was complete, so the run compares with runs that stopped there. The
    extended result is kept, behind all others, as a further run with a budget of its own ("1000
    steps, then 2000 steps") if runs of another variant were extended alike. Notes are by folder.
    """
    kept: list[Run] = []
    extended: dict[str, list[Run]] = {}
    for run in runs:
        ends = run.completed if run.completed is not None else _in_record(run)
        before = [end for end in ends if end.step < run.steps and "val/loss" in finite(end.metrics)]
        kept.append(_at(run, before[0]) if before else run)
        if before:
            history = ", then ".join([*map(_words, before), run.budget])
            whole = _with_budget(run, history)
            extended.setdefault(history, []).append(whole)
    notes = {}
    for history, members in extended.items():
        alike = len({run.variant for run in members}) > 1
        kept += members if alike else []
        notes |= {run.folder: _note(run, history, alike) for run in members}
    return kept, notes


def _in_record(run: Run) -> list[Completed]:
    """Return the finished budgets from metrics.jsonl, for a summary.json that lacks them."""
    ends = budget_ends(run.folder)
    return [Completed({"steps": step}, step, {**metrics}) for step, metrics in ends]


def _words(end: Completed) -> str:
    given = {f"budget.{unit}": str(value) for unit, value in end.budget.items()}
    return one_line(budget_words(given))


def _with_budget(run: Run, words: str) -> Run:
    return replace(run, budget=words, settings={**run.settings, "budget": words})


def _at(run: Run, end: Completed) -> Run:
    costs = {name: value for name, value in run.metrics.items() if name.startswith("cost/")}
    making = run.making and at_step(run.making, end.step)
    first = replace(run, metrics=costs | finite(end.metrics), steps=end.step, making=making)
    first = replace(first, until=end.step)
    return _with_budget(first, _words(end))


def _note(run: Run, history: str, alike: bool) -> str:
    later = (
        "its final loss is compared with runs extended alike"
        if alike
        else f"its final loss, {run.metrics['val/loss']:.4f}, has no run to compare with"
    )
    return one_line(
        f"{run.folder} was extended ({history}): it is compared at the end of its first budget; "
        f"{later}"
    )
