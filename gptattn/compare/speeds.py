"""Compares how fast rows train, by the rounds of `speed.json`, and says what is not compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gptattn import command
from gptattn.compare.finished_runs import Run
from gptattn.compare.statistics import Estimate, t_interval
from gptattn.runs.metrics import MEASURED, MEMORY
from gptattn.runs.speeds import Measured

HALF_WIDTH = 0.03  # of a ratio's interval: narrow enough


def compare_rounds(base: Sequence[float], own: Sequence[float], comparisons: int) -> Estimate:
    """Return the ratio of speeds, from the seconds of both in each round.

    Its interval is Student's, of the logarithms of the rounds' ratios, Bonferroni-corrected.
    """
    logs = np.log(np.asarray(base) / np.asarray(own))
    low, high = t_interval(logs, comparisons) or (-np.inf, np.inf)
    return Estimate(
        len(logs), float(np.exp(logs.mean())), (float(np.exp(low)), float(np.exp(high)))
    )


def are_narrow(seconds: Mapping[str, Sequence[float]], baseline: str) -> bool:
    """Whether the interval of each ratio to the baseline is within 3% of it."""
    others = [own for name, own in seconds.items() if name != baseline]
    ratios = [compare_rounds(seconds[baseline], own, len(others)) for own in others]
    return all(one.interval and one.interval[1] <= one.mean * (1 + HALF_WIDTH) for one in ratios)


def list_measured(runs: Sequence[Run]) -> Sequence[Measured]:
    """Return the measurements of a row, the newest last: of any of its runs, which are alike."""
    return next((run.speeds for run in runs if run.speeds), ())


def compare_speeds(groups: Mapping[str, Sequence[Run]], baseline: str) -> dict[str, Estimate]:
    """Return the ratio of the tokens/s to the baseline's of each row that took turns with it."""
    bases = {one.session.made: one.turns.step for one in list_measured(groups[baseline])}
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for name in groups.keys() - {baseline}:
        common = [one for one in list_measured(groups[name]) if one.session.made in bases]
        if common:
            pairs[name] = bases[common[-1].session.made], common[-1].turns.step
    return {name: compare_rounds(*pair, len(pairs)) for name, pair in pairs.items()}


def leave_out_incomparable(
    groups: Mapping[str, Sequence[Run]], baseline: str, metrics: Mapping[str, dict[str, Any]]
) -> list[str]:
    """Remove speeds and peaks of memory that cannot be compared from the rows' `metrics`.

    Return how speeds were measured, and why figures are missing.
    """
    runs = [run for own in groups.values() for run in own]
    places = {tuple(run.environment.get(key) for key in ("device", "threads")) for run in runs}
    notes = []
    if (shared := any(run.shared for run in runs)) or len(places) > 1:
        for own in metrics.values():
            own.pop(MEMORY, None)
        why = "shared the machine" if shared else "differ in machine or threads"
        notes.append(f"no peak MB: the runs {why}")
    newest = {name: own[-1] for name, runs in groups.items() if (own := list_measured(runs))}
    if base := newest.get(baseline):
        notes.append(f"speeds: medians of {len(base.turns.step)} rounds in turns, {base.place}")
    for name, one in newest.items():
        if base is None or one.place != base.place:
            for metric in MEASURED:
                metrics[name].pop(metric, None)
            notes.append(f"no speed of {name}: it was measured apart, on {one.place}")
    if lacking := [name for name in groups if name not in newest]:
        how = f"{command('compare')} {runs[0].folder.parent} speed=true"
        notes.append(f"no speed of {', '.join(lacking)}; {how} measures it")
    return notes
