"""From runs to the aggregate: rows, differences, tests, fronts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gptattn.compare import statistics
from gptattn.compare.extended import at_first_budgets
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
from gptattn.compare.runs import Run
from gptattn.compare.sections import RunSet, comparable_sets
from gptattn.compare.statistics import Interval
from gptattn.config import suggest
from gptattn.errors import ConfigError


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
    runs, replaced = without_replaced(runs)
    runs, extended = at_first_budgets(runs)
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
    return Comparison(
        list(folders),
        sections,
        [*extended, *differences_in_making(runs)],
        [*passed_over, *replaced],
        curves={},
    )


def _section(found: RunSet, groups: Groups, baseline: str, warnings: list[str]) -> Section:
    base = groups[baseline]
    others = [name for name in groups if name != baseline]
    differences = {d.variant: d for d in compare_all(groups, others, baseline)}
    rows = [
        Row(
            name,
            members,
            _estimates(members),
            differences.get(name),
            _speed(members, base) if name != baseline else None,
            [],
        )
        for name, members in groups.items()
    ]
    rows.sort(key=lambda row: (row.name != baseline, row.loss, row.name))
    leader = min(rows, key=lambda row: row.loss).name
    rest = [row.name for row in rows if row.name != leader]
    return Section(
        found.title,
        baseline,
        _with_fronts(rows),
        leader if rest else None,
        compare_all(groups, rest, leader),
        warnings,
        found.size,
        found.family,
    )


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


def compare_all(groups: Groups, names: Sequence[str], baseline: str) -> list[Difference]:
    """Each named group's loss against the baseline's, Holm's correction over all of them."""
    return compare_pairs(groups, [(baseline, name) for name in names])


def compare_pairs(groups: Groups, names: Sequence[tuple[str, str]]) -> list[Difference]:
    """The second's loss against the first's of each pair, Holm's correction over all of them."""
    pairs = {pair: _paired(groups[pair[1]], groups[pair[0]], "val/loss") for pair in names}
    pairs = {pair: losses for pair, losses in pairs.items() if losses.shape[1]}
    tested = [pair for pair, losses in pairs.items() if losses.shape[1] > 1]
    m = len(tested)
    p = [statistics.permutation_p(*pairs[pair], m) for pair in tested]
    corrected = statistics.holm(p)
    found = []
    for (baseline, name), pair in pairs.items():
        d = pair[0] - pair[1]
        interval, method = statistics.difference_interval(d)
        difference = Difference(
            name,
            baseline,
            n=len(d),
            mean=float(d.mean()),
            deviation=float(d.std(ddof=1)) if len(d) > 1 and np.ptp(d) > 0 else 0.0,
            interval=interval,
            interval_method=method,
            p=None,
            p_holm=None,
            test=statistics.test_name(len(d), m),
            comparisons=m,
            reachable=False,
            seeds_needed=None,
        )
        if (baseline, name) in tested:
            difference = _tested(difference, p, corrected, tested.index((baseline, name)))
        found.append(difference)
    return found


def _tested(
    difference: Difference, p: Sequence[float], corrected: Sequence[float], index: int
) -> Difference:
    m = len(p)
    # The others stay as they are: how far Holm's correction lowers the bar depends on them.
    extreme = [*p]
    extreme[index] = statistics.smallest_p(difference.n, m)
    needed = statistics.seeds_needed(difference.mean, difference.deviation, m)
    fewest = statistics.fewest_seeds(m)
    return replace(
        difference,
        p=p[index],
        p_holm=corrected[index],
        reachable=statistics.holm(extreme)[index] < statistics.ALPHA,
        seeds_needed=None if needed is None or fewest is None else max(needed, fewest),
    )


def _speed(members: Sequence[Run], base: Sequence[Run]) -> tuple[float, Interval] | None:
    """Geometric mean of the paired ratios, with a t interval taken on their logarithms."""
    ours, theirs = _paired(members, base, "perf/tokens_per_s")
    if len(ours) < 2 or (ours <= 0).any() or (theirs <= 0).any():
        return None
    ratios = np.log(ours / theirs)
    interval = statistics.t_interval(ratios)
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
