"""How fast rows train and decode: from the turns in `speed.json`, compared within their rounds.

`training/speed.py` measures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptattn import command
from gptattn.compare.finished_runs import Run
from gptattn.compare.statistics import Interval, t_interval
from gptattn.runs.metrics import MEASURED, MEMORY
from gptattn.runs.speeds import Measured

HALF_WIDTH = 0.03  # of a ratio's interval: narrow enough


@dataclass(frozen=True)
class Ratio:
    """How many times as many tokens/s as the baseline a row trains on."""

    value: float
    interval: Interval | None  # 95% over all ratios of the section; None: of a single round
    rounds: int

    @property
    def shown(self) -> bool:
        """Whether the rounds show a difference: the interval excludes 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


def compare_rounds(base: Sequence[float], own: Sequence[float], comparisons: int) -> Ratio:
    """Return the ratio of speeds, from the seconds of each round, [rounds].

    Student's t of the logarithms of the ratios within rounds, Bonferroni-corrected.
    """
    logs = np.log(np.asarray(base) / np.asarray(own))
    interval = t_interval(logs, comparisons)
    ends = None if interval is None else (float(np.exp(interval[0])), float(np.exp(interval[1])))
    return Ratio(float(np.exp(logs.mean())), ends, len(logs))


def are_narrow(seconds: Mapping[str, Sequence[float]], baseline: str) -> bool:
    """Whether the interval of each ratio to the baseline is within 3% of it."""
    others = [own for name, own in seconds.items() if name != baseline]
    ratios = [compare_rounds(seconds[baseline], own, len(others)) for own in others]
    return all(r.interval and r.interval[1] <= r.value * (1 + HALF_WIDTH) for r in ratios)


def list_measured(runs: Sequence[Run]) -> Sequence[Measured]:
    """Return the measurements of a row, the newest last: of any of its runs, which are alike."""
    return next((run.speeds for run in runs if run.speeds), ())


def compare_speeds(groups: Mapping[str, Sequence[Run]], baseline: str) -> dict[str, Ratio]:
    """Return the ratio of each row that has taken turns with the baseline, by name."""
    bases = {one.session.made: one.turns for one in list_measured(groups[baseline])}
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for name, runs in groups.items():
        common = [one for one in list_measured(runs) if one.session.made in bases]
        if common and name != baseline:
            pairs[name] = bases[common[-1].session.made].step, common[-1].turns.step
    return {name: compare_rounds(base, own, len(pairs)) for name, (base, own) in pairs.items()}


def leave_out_incomparable(
    groups: Mapping[str, Sequence[Run]], baseline: str, metrics: Mapping[str, dict[str, Any]]
) -> list[str]:
    """Remove speeds and peaks of memory that cannot be compared from the rows' `metrics`.

    Return what was measured how, and why figures are missing, as sentences.
    """
    notes = []
    runs = [run for own in groups.values() for run in own]
    places = {tuple(run.environment.get(key) for key in ("device", "threads")) for run in runs}
    shared = any(run.shared for run in runs)
    if shared or len(places) > 1:
        for own in metrics.values():
            own.pop(MEMORY, None)
        why = "runs shared the machine" if shared else "runs differ in machine or threads"
        notes.append(f"peak MB is left out: {why}")
    newest = {name: own[-1] for name, runs in groups.items() if (own := list_measured(runs))}
    base = newest.get(baseline) or next(iter(newest.values()), None)
    if base is not None:
        elsewhere = [name for name, one in newest.items() if one.place != base.place]
        for name in elsewhere:
            for metric in MEASURED:
                metrics[name].pop(metric, None)
            notes.append(f"{name}: its speed is not compared, since it is of {newest[name].place}")
        notes.insert(0, f"speeds: medians of {len(base.turns.step)} rounds in turns, {base.place}")
    if without := [name for name in groups if name not in newest]:
        folder = runs[0].folder.parent
        of = "" if len(without) == len(groups) else f" of {', '.join(without)}"
        how = f"{command('compare')} {folder} speed=true"
        notes.append(f"no speed{of} has been measured; {how} does so")
    return notes
