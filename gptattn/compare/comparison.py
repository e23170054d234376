"""Builds the Comparison from finished runs: rows, differences, tests, Pareto fronts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gptattn.compare import statistics
from gptattn.compare.across import Compared, compare_across
from gptattn.compare.extended import at_first_budgets
from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import (
    Groups,
    differences_in_settings,
    group_runs,
    name_copies,
    pick_baseline,
)
from gptattn.compare.ladder import ladders
from gptattn.compare.makings import differences_in_making, without_replaced
from gptattn.compare.paired import compare_all, compare_pairs, paired
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
    """Compare the runs; `with_curves` adds the curves afterwards.

    `folders` and `passed_over` are only recorded. `baseline` is a row or variant name, by default
    `mha`. With `split`, runs that differ in text or validation get sections of their own. Raises
    ConfigError if they differ so without `split`, or if no row has the baseline's name.
    """
    runs, extended = at_first_budgets(runs)
    runs, replaced = without_replaced(runs)
    sets = [(found, group_runs(found.runs)) for found in comparable_sets(runs, split)]
    picked = [pick_baseline(groups, baseline) for _, groups in sets]
    if not any(picked):
        names = {name for _, groups in sets for name in groups}
        message = f"{baseline!r} is not a row of the report; {suggest(baseline or '', names)}"
        raise ConfigError("--baseline", message)
    sections, compared = list[Section](), list[Compared]()
    for (found, groups), name in zip(sets, picked, strict=True):
        row = name or pick_baseline(groups, None)
        assert row is not None
        warnings = differences_in_settings(groups, row)
        if name is None:
            warnings.append(f"{baseline} is not among these runs; the baseline here is {row}")
        sections.append(_section(found, groups, row, warnings))
        compared.append((found, groups, row))
    across = compare_across(compared)
    copies = [line for found, groups in sets for line in name_copies(found.runs, groups)]
    left_out = [*passed_over, *replaced, *dict.fromkeys(copies)]
    comparison = Comparison(
        list(folders), sections, [], left_out, curves={}, across=across, ladders=ladders(compared)
    )
    # Only the newest run of a seed is shown: drop the notes on the others.
    shown = {run.folder for run in comparison.runs}
    notes = [note for folder, note in extended.items() if folder in shown]
    return replace(comparison, warnings=[*notes, *differences_in_making(runs)])


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
            _speed(members, base, len(others)) if name != baseline else None,
            [],
        )
        for name, members in groups.items()
    ]
    rows.sort(key=lambda row: (row.name != baseline, row.loss, row.name))
    leader = min(rows, key=lambda row: row.loss).name
    rivals = _rivals(groups, leader, baseline, differences)
    distinct = _distinct_from_leader(rivals, baseline, differences)
    return Section(
        found.title,
        baseline,
        _with_fronts(rows),
        leader if others else None,
        rivals,
        [row.name for row in rows if row.name not in (leader, *distinct)],
        warnings,
        found.size,
        found.family,
    )


def _rivals(
    groups: Groups, leader: str, baseline: str, rows: Mapping[str, Difference]
) -> list[Difference]:
    """Return the difference of each other row to the leader.

    A pair with the baseline is not tested again: its difference is in `rows`.
    """
    if leader == baseline:
        return list(rows.values())
    others = [name for name in groups if name not in (leader, baseline)]
    # The leader is picked after the losses were seen, so correct over all pairs of variants.
    pairs = math.comb(len(groups) - 1, 2)
    found = compare_pairs(groups, [(leader, name) for name in others], pairs)
    return [*([_reversed(rows[leader])] if leader in rows else []), *found]


def _distinct_from_leader(
    rivals: Sequence[Difference], baseline: str, rows: Mapping[str, Difference]
) -> list[str]:
    """Return the rows that differ from the leader, with a 5% chance of any false claim.

    If neither of the two is the baseline, at least one must also differ from the baseline. So if
    all variants are equal, a false claim here needs a false claim against the baseline first.
    """
    shown = {name for name, d in rows.items() if d.shown}
    return [
        d.variant
        for d in rivals
        if d.shown and (baseline in (d.variant, d.baseline) or shown & {d.variant, d.baseline})
    ]


def _reversed(d: Difference) -> Difference:
    """Return the difference with variant and baseline exchanged."""
    interval = None if d.interval is None else (-d.interval[1], -d.interval[0])
    return replace(d, variant=d.baseline, baseline=d.variant, mean=0.0 - d.mean, interval=interval)


def _estimates(members: Sequence[Run]) -> dict[str, Estimate]:
    found = {}
    for metric in METRICS:
        (values,) = paired([members], metric).values
        if len(values):
            # Of all seeds, with `sweep.until` too: differences alone decided how many they are.
            interval = statistics.t_interval(values)
            found[metric] = Estimate(len(values), float(values.mean()), interval)
    return found


def _speed(
    members: Sequence[Run], base: Sequence[Run], comparisons: int
) -> tuple[float, Interval] | None:
    """Return the geometric mean of the paired tokens/s ratios and the t interval of their logs.

    Return None with fewer than two common seeds or a speed of 0.
    """
    ours, theirs = paired([members, base], "perf/tokens_per_s").values
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
        # `pareto_front` minimises, and more tokens/s is better.
        sign = -1 if cost == "speed" else 1
        costs = [sign * row.metrics[metric].mean for row in having]
        for i in statistics.pareto_front(costs, [row.loss for row in having]):
            fronts[having[i].name].append(cost)
    return [replace(row, fronts=fronts[row.name]) for row in rows]
