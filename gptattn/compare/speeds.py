"""Compares training speeds by the rounds in `speed.json`, and says what cannot be compared."""

import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from gptattn import command
from gptattn.compare.finished_runs import Run
from gptattn.compare.statistics import Estimate, critical_t
from gptattn.runs.metrics import MEASURED, MEMORY, SPEED_RATIO
from gptattn.runs.speeds import Measurement

HALF_WIDTH = 0.03  # of a ratio's interval that is narrow enough


def compare_rounds(base: Sequence[float], own: Sequence[float], comparisons: int) -> Estimate:
    """Return the ratio of speeds, from the seconds of both in each round.

    It is the 20% trimmed mean of the rounds' log ratios, because other work comes in bursts. The
    interval is Yuen's (1974, Biometrika 61, 165-170), with a Bonferroni correction.
    """
    logs = np.sort(np.log(np.asarray(base) / np.asarray(own)))
    kept = logs[len(logs) // 5 : len(logs) - len(logs) // 5]
    n, squares = len(kept), len(logs) * np.clip(logs, kept[0], kept[-1]).var()
    half = critical_t(n, comparisons) * np.sqrt(squares / (n * (n - 1))) if n > 1 else np.inf
    low, mean, high = np.exp(kept.mean() + np.array([-half, 0.0, half])).tolist()
    return Estimate(len(logs), mean, (low, high))


def are_narrow(seconds: Mapping[str, Sequence[float]], baseline: str) -> bool:
    """Whether each interval of a ratio to the baseline ends within 3% of the ratio."""
    others = [own for name, own in seconds.items() if name != baseline]
    ratios = [compare_rounds(seconds[baseline], own, len(others)) for own in others]
    return all(one.interval and one.interval[1] <= one.mean * (1 + HALF_WIDTH) for one in ratios)


def list_measured(runs: Sequence[Run]) -> Sequence[Measurement]:
    """Return a row's measurements, the newest last, from any of its runs, which share them."""
    return next((run.speeds for run in runs if run.speeds), ())


def compare_speeds(
    groups: Mapping[str, Sequence[Run]], baseline: str, metrics: Mapping[str, dict[str, Estimate]]
) -> list[str]:
    """Put the rows' speeds and ratios into `metrics`, and remove what cannot be compared.

    A row gets a ratio and speeds if it took turns with the baseline on the machine where the
    baseline was last measured; its speeds are scaled to the baseline's newest. Peaks of memory need
    equal threads. Return how speeds were measured, and why figures are missing.
    """
    runs = [run for own in groups.values() for run in own]
    places = {tuple(run.environment.get(key) for key in ("device", "threads")) for run in runs}
    notes = []
    if (shared := any(run.shared for run in runs)) or len(places) > 1:
        for own in metrics.values():
            own.pop(MEMORY, None)
        why = "shared the machine" if shared else "used different machines or threads"
        notes.append(f"peak MB left out: the runs {why}")
    bases = {one.session.timestamp: one for one in list_measured(groups[baseline])}
    pairs: dict[str, tuple[Measurement, Measurement]] = {}
    if bases:
        newest = [*bases.values()][-1]
        for name in groups:
            for own in list_measured(groups[name]):
                base = bases.get(own.session.timestamp)
                if base is not None and base.place == newest.place:
                    pairs[name] = base, own
        for name, (base, own) in pairs.items():
            if name != baseline:
                ratio = compare_rounds(base.turns.step, own.turns.step, len(pairs) - 1)
                metrics[name][SPEED_RATIO] = ratio
            for metric, value in own.metrics.items():
                if metric in base.metrics and metric in newest.metrics:
                    value *= newest.metrics[metric] / base.metrics[metric]
                metrics[name][metric] = Estimate(len(own.turns.step), value, None)
        notes.append(f"speeds: medians over interleaved rounds ({newest.place})")
    lacking = [name for name in groups if name not in pairs]
    for name in lacking:
        for metric in MEASURED:
            metrics[name].pop(metric, None)
    if lacking:
        apart = {own[-1].place for name in lacking if (own := list_measured(groups[name]))}
        why = f", measured separately ({'; '.join(sorted(apart))})" if apart else ""
        folders = shlex.join(sorted({str(run.folder.parent) for run in runs}))
        how = f"to measure them together: {command('compare')} {folders} speed=true"
        notes.append(f"speeds left out for {', '.join(lacking)}{why}; {how}")
    return notes
