"""From runs to the aggregate: rows, differences, tests, fronts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gptattn.compare import statistics
from gptattn.compare.extended import at_first_budgets
from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import (
    Groups,
    differences_in_settings,
    group_runs,
    pick_baseline,
)
from gptattn.compare.makings import differences_in_making, without_replaced
from gptattn.compare.results import (
    COSTS,
    METRICS,
    Comparison,
    Difference,
    Estimate,
    Row,
    Section,
)
from gptattn.compare.sections import RunSet, comparable_sets
from gptattn.compare.statistics import Interval
from gptattn.compare.uptraining import Uptraining, part_uptrained
from gptattn.errors import ConfigError
from gptattn.settings.values import suggest


def compare(
    runs: Sequence[Run],
    *,
    folders: Sequence[str] = (),
    baseline: str | None = None,
    split: bool = False,
    passed_over: Sequence[str] = (),
) -> Comparison:
    """The comparison of the runs, without curves.

    Raises ConfigError where they cannot be compared, or where there is no such baseline.
    """
    whole = runs
    runs, extended = at_first_budgets(runs)
    runs, replaced = without_replaced(runs)
    kept = {run.folder for run in runs}
    # What started from a run started from its end, not from where its first budget was over.
    uptrainings, uptrained = part_uptrained([run for run in whole if run.folder in kept])
    everything, apart = runs, {run.folder for run in uptrained}
    runs = [run for run in runs if run.folder not in apart]
    sets = [(found, group_runs(found.runs)) for found in comparable_sets(runs, split)]
    picked = [pick_baseline(groups, baseline) for _, groups in sets]
    if not any(picked):
        names = {name for _, groups in sets for name in groups}
        message = f"{baseline!r} is no row of the report; {suggest(baseline or '', names)}"
        raise ConfigError("--baseline", message)
    sections = []
    for (found, groups), name in zip(sets, picked, strict=True):
        warnings = differences_in_settings(groups)
        if name is None:
            name = pick_baseline(groups, None)
            assert name is not None
            warnings.append(f"{baseline} is not among these runs; the baseline here is {name}")
        sections.append(_section(found, groups, name, warnings))
    sections += [_uptrained_section(uptraining) for uptraining in uptrainings]
    comparison = Comparison(list(folders), sections, [], [*passed_over, *replaced], curves={})
    # Of several runs with one seed some are not shown, and nothing is said of those.
    shown = {run.folder for run in comparison.runs}
    notes = [note for folder, note in extended.items() if folder in shown]
    return replace(comparison, warnings=[*notes, *differences_in_making(everything)])


def _section(found: RunSet, groups: Groups, baseline: str, warnings: list[str]) -> Section:
    base = groups[baseline]
    others = [name for name in groups if name != baseline]
    differences = {d.variant: d for d in compare_all(groups, others, baseline)}
    rows = [
        replace(
            _row(name, members),
            difference=differences.get(name),
            speed=_speed(members, base, len(others)) if name != baseline else None,
        )
        for name, members in groups.items()
    ]
    rows.sort(key=lambda row: (row.name != baseline, row.loss, row.name))
    leader = min(rows, key=lambda row: row.loss).name
    rivals = _rivals(groups, leader, baseline, differences)
    told_apart = _told_apart(rivals, baseline, differences)
    return Section(
        found.title,
        baseline,
        _with_fronts(rows),
        leader if others else None,
        rivals,
        [row.name for row in rows if row.name not in (leader, *told_apart)],
        warnings,
        found.size,
        found.family,
    )


def _row(name: str, members: list[Run]) -> Row:
    return Row(name, members, _estimates(members), None, None, [])


def _uptrained_section(uptraining: Uptraining) -> Section:
    groups, from_scratch = uptraining.groups, uptraining.from_scratch
    runs = [run for members in groups.values() for run in members]
    found = RunSet(uptraining.title, "", uptraining.family, runs)
    return replace(
        _section(found, groups, uptraining.source, uptraining.warnings),
        share=uptraining.share,
        pairs=compare_pairs(groups | from_scratch, uptraining.pairs),
        from_scratch=[_row(name, members) for name, members in from_scratch.items()],
    )


def _rivals(
    groups: Groups, leader: str, baseline: str, rows: Mapping[str, Difference]
) -> list[Difference]:
    """Each other row against the leader. A pair with the baseline has its row's one decision."""
    if leader == baseline:
        return list(rows.values())
    others = [name for name in groups if name not in (leader, baseline)]
    # Picked after the fact: any of the pairs of variants could have come to be compared.
    pairs = math.comb(len(groups) - 1, 2)
    found = compare_pairs(groups, [(leader, name) for name in others], pairs)
    return [*([_turned(rows[leader])] if leader in rows else []), *found]


def _told_apart(
    rivals: Sequence[Difference], baseline: str, rows: Mapping[str, Difference]
) -> list[str]:
    """The rows that the leader is told apart from, with 5% for any of them by mistake.

    Of two that are not the baseline, one must also be told apart from it: so where all are equal,
    the leader is told apart from somebody no more often than some row is from the baseline.
    """
    shown = {name for name, d in rows.items() if d.shown}
    return [
        d.variant
        for d in rivals
        if d.shown and (baseline in (d.variant, d.baseline) or shown & {d.variant, d.baseline})
    ]


def _turned(d: Difference) -> Difference:
    """The same difference, seen from the other one."""
    interval = None if d.interval is None else (-d.interval[1], -d.interval[0])
    return replace(d, variant=d.baseline, baseline=d.variant, mean=0.0 - d.mean, interval=interval)


def _estimates(members: Sequence[Run]) -> dict[str, Estimate]:
    found = {}
    for metric in METRICS:
        values = [run.metrics[metric] for run in members if metric in run.metrics]
        if values:
            interval = statistics.t_interval(values)
            found[metric] = Estimate(len(values), float(np.mean(values)), interval)
    return found


def _paired(members: Sequence[Run], base: Sequence[Run], metric: str) -> np.ndarray:
    """The metric at the seeds that both have, [2, n]: the members', then the baseline's."""
    ours, theirs = (
        {run.seed: run.metrics[metric] for run in runs if metric in run.metrics}
        for runs in (members, base)
    )
    seeds = sorted(ours.keys() & theirs.keys())
    return np.array([[ours[s] for s in seeds], [theirs[s] for s in seeds]])


def compare_all(
    groups: Groups, names: Sequence[str], baseline: str, comparisons: int | None = None
) -> list[Difference]:
    """Each named group's loss against the baseline's, corrected over all of them."""
    return compare_pairs(groups, [(baseline, name) for name in names], comparisons)


def compare_pairs(
    groups: Groups, names: Sequence[tuple[str, str]], comparisons: int | None = None
) -> list[Difference]:
    """The second's loss against the first's of each pair that has a seed in common.

    Corrected over `comparisons`, by default the pairs that have seeds enough for a test.
    """
    pairs = {pair: _paired(groups[pair[1]], groups[pair[0]], "val/loss") for pair in names}
    m = comparisons or sum(losses.shape[1] > 1 for losses in pairs.values())
    return [
        _difference(name, baseline, losses[0] - losses[1], m)
        for (baseline, name), losses in pairs.items()
        if losses.shape[1]
    ]


def _difference(name: str, baseline: str, d: np.ndarray, comparisons: int) -> Difference:
    """What the paired differences [n] show."""
    n, mean = len(d), float(d.mean())
    if statistics.all_equal(d):
        return Difference(name, baseline, n, mean, 0.0, None, None, comparisons, None)
    deviation = float(d.std(ddof=1))
    return Difference(
        name,
        baseline,
        n,
        mean,
        deviation,
        statistics.t_interval(d, comparisons),
        statistics.paired_p(d, comparisons),
        comparisons,
        statistics.seeds_needed(mean, deviation, comparisons),
    )


def _speed(
    members: Sequence[Run], base: Sequence[Run], comparisons: int
) -> tuple[float, Interval] | None:
    """Geometric mean of the paired ratios, with a t interval taken on their logarithms."""
    ours, theirs = _paired(members, base, "perf/tokens_per_s")
    if len(ours) < 2 or (ours <= 0).any() or (theirs <= 0).any():
        return None
    ratios = np.log(ours / theirs)
    interval = statistics.t_interval(ratios, comparisons)
    assert interval is not None
    return float(np.exp(ratios.mean())), (float(np.exp(interval[0])), float(np.exp(interval[1])))


def _with_fronts(rows: Sequence[Row]) -> list[Row]:
    fronts: dict[str, list[str]] = {row.name: [] for row in rows}
    for cost, metric in COSTS.items():
        having = [row for row in rows if metric in row.metrics]
        # Of speed more is better; the front wants less of everything.
        sign = -1 if cost == "speed" else 1
        costs = [sign * row.metrics[metric].mean for row in having]
        for i in statistics.pareto_front(costs, [row.loss for row in having]):
            fronts[having[i].name].append(cost)
    return [replace(row, fronts=fronts[row.name]) for row in rows]
