"""Makes the Comparison, from which tables, verdicts, plots and the page are made.

The classes come first, then the functions that make them: the whole, then sections and rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pandas import DataFrame

from gptattn.compare import statistics
from gptattn.compare.differences import differences_in_provenance, differences_in_settings
from gptattn.compare.finished_runs import Run, without_replaced
from gptattn.compare.rows import Groups, comparable_sets, group_runs, pairs_of_parts, rates_differ
from gptattn.compare.speeds import compare_speeds
from gptattn.compare.statistics import Difference, Estimate, compare_family, compare_interactions
from gptattn.errors import ConfigError
from gptattn.runs.metrics import (
    ACCURACY,
    CACHE,
    DECODING_MS,
    FLOPS,
    LOSS,
    OF_DATA,
    PARAMS,
    REPORTED,
    TRAINING_MS,
    list_slices,
)
from gptattn.runs.overrides import read_typed
from gptattn.settings.values import suggest

COSTS = {
    "params": PARAMS,
    "cache": CACHE,
    "flops": FLOPS,
    "training": TRAINING_MS,
    "decoding": DECODING_MS,
}


@dataclass(frozen=True)
class Row:
    """One variant: runs that differ only in the seed."""

    name: str
    runs: list[Run]
    metrics: dict[str, Estimate]  # those that at least one of its runs has
    difference: Difference | None  # from the baseline; None: is the baseline, or shares no seed
    fronts: list[str]  # the Pareto fronts it is on, as keys of COSTS

    @property
    def n(self) -> int:
        """Number of runs, one per seed."""
        return len(self.runs)

    @property
    def loss(self) -> float:
        """Mean validation loss, nats per token."""
        return self.metrics[LOSS].mean

    def mean(self, metric: str) -> float | None:
        """Return the metric's mean over the runs; None if no run has it."""
        return self.metrics[metric].mean if metric in self.metrics else None


@dataclass(frozen=True)
class Section:
    """Rows that can be compared with each other."""

    title_parts: Mapping[str, str]  # its difference from other sections, by axis; "": none
    baseline: str
    rows: list[Row]  # the baseline first, the others by loss
    leader: str | None  # the row with the lowest mean loss; None with one row
    rivals: list[Difference]  # each other row minus the leader
    interactions: list[Difference]  # of two parts: both together, minus the sum of each alone
    ties: list[str]  # rows not shown to differ from the leader
    warnings: list[str]
    notes: list[str]  # about speeds and missing figures

    @property
    def title(self) -> str:
        """How it differs from the other sections; "" if it is the only one."""
        return self.title_without()

    def title_without(self, *axes: str) -> str:
        """Return the title without these axes: equal for sections that differ only in them."""
        return ", ".join(one for axis, one in self.title_parts.items() if one and axis not in axes)


@dataclass(frozen=True)
class Comparison:
    """The whole report."""

    folders: list[str]
    sections: list[Section]
    warnings: list[str]
    skipped: list[str]

    @property
    def runs(self) -> list[Run]:
        """All runs of all sections."""
        return [run for section in self.sections for row in section.rows for run in row.runs]

    def table(self) -> DataFrame:
        """Return a pandas DataFrame, as in comparison.csv: a row per variant and section.

        Interactions of parts follow; their `baseline` is the sum of separate gains; no metrics.
        A metric's column is its mean over `n` seeds, and the columns after it are its 95% interval.
        `difference` is the mean of the paired differences from `baseline` over `paired n` seeds;
        its interval and p have a Bonferroni correction over `comparisons`.
        """
        rows = [(section, row) for section in self.sections for row in section.rows]
        recorded = set[str]().union(*(row.metrics for _, row in rows))
        metrics = [metric for metric in REPORTED if metric in recorded or metric not in OF_DATA]
        metrics += dict.fromkeys(m for _, row in rows for m in row.metrics if m not in REPORTED)
        columns = [
            *("section", "variant", "n"),
            *(f"{metric}{end}" for metric in metrics for end in ("", " low", " high")),
            *("baseline", "paired n", "difference", "difference low", "difference high"),
            *("p", "comparisons", "seeds needed", "pareto"),
        ]
        lines = [_table_row(section, row) for section, row in rows]
        lines += [
            {"section": section.title, "variant": d.variant, "n": d.n, "baseline": d.baseline}
            | _figures(d)
            for section in self.sections
            for d in section.interactions
        ]
        table = DataFrame(lines, columns=columns)
        return table.astype(dict.fromkeys(("paired n", "comparisons", "seeds needed"), "Int64"))


def _table_row(section: Section, row: Row) -> dict[str, Any]:
    """Return the row's figures by column, except those it lacks."""
    line: dict[str, Any] = {
        "section": section.title,
        "variant": row.name,
        "n": row.n,
        "baseline": section.baseline,
        "pareto": " ".join(row.fronts),
    }
    for name, figure in row.metrics.items():
        line |= _with_interval(name, figure)
    return line if row.difference is None else line | _figures(row.difference)


def _figures(d: Difference) -> dict[str, Any]:
    figures = {"paired n": d.n, "p": d.p, "comparisons": d.comparisons}
    return _with_interval("difference", d) | figures | {"seeds needed": d.seeds_needed}


def _with_interval(name: str, figure: Estimate | Difference) -> dict[str, Any]:
    low, high = figure.interval or (None, None)
    return {name: figure.mean, f"{name} low": low, f"{name} high": high}


def compare(
    runs: Sequence[Run],
    *,
    folders: Sequence[str] = (),
    baseline: str | None = None,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    skipped: Sequence[str] = (),
) -> Comparison:
    """Compare the runs.

    `folders` and `skipped` are only recorded. `baseline` is the name of a row or variant, by
    default `mha`. `by`: the settings to compare instead of the attention. `metrics`: additional
    metrics to report. Raises ConfigError for an unknown baseline, setting or metric.
    """
    recorded = set[str]().union(*(run.metrics for run in runs))
    for metric in metrics:
        if metric not in recorded:
            raise ConfigError("metrics", f"no run has {metric}; {suggest(metric, recorded)}")
    runs, replaced = without_replaced(runs)
    sets = comparable_sets(runs, by)
    grouped = [group_runs(found.runs) for found in sets]
    picked = [pick_baseline(groups, baseline) for groups in grouped]
    if not any(picked):
        names = {name for groups in grouped for name in groups}
        message = f"{baseline!r} is not a row of the report; {suggest(baseline or '', names)}"
        raise ConfigError("baseline", message)
    sections = []
    for found, groups, name in zip(sets, grouped, picked, strict=True):
        row = name or plain_row(groups)
        warnings = differences_in_settings(groups, row, by, own_rates=rates_differ(found.runs))
        unchecked = [name for name, own in groups.items() if not all(run.checked for run in own)]
        if unchecked:
            warnings.append(f"causality not checked (checks=false): {', '.join(unchecked)}")
        if len({run.steps for own in groups.values() for run in own}) > 1 and any(
            "accuracy" in run.settings.get("budget", "") for run in found.runs
        ):
            warnings.append(
                "runs stopped at different steps, when they reached the accuracy; compare steps, "
                "not losses"
            )
        if name is None:
            warnings.append(f"{baseline} is not among these runs, so the baseline here is {row}")
        sections.append(make_section(groups, row, found.title_parts, warnings, metrics))
    counted = {run.folder for section in sections for row in section.rows for run in row.runs}
    copies = [
        f"{folder}: not counted; a newer run has the same settings and seed"
        for folder in dict.fromkeys(run.folder for run in runs)
        if folder not in counted
    ]
    return Comparison(
        list(folders), sections, differences_in_provenance(runs), [*skipped, *replaced, *copies]
    )


def pick_baseline(groups: Groups, name: str | None) -> str | None:
    """Return the row called `name`, or the only row of the variant `name`; None if neither exists.

    Without a name, return `plain_row`.
    """
    if name is None:
        return plain_row(groups)
    rows = [row for row, members in groups.items() if members[0].variant == name]
    if name in groups:
        return name
    return rows[0] if len(rows) == 1 else None


def plain_row(groups: Groups) -> str:
    """Return the row with the fewest words in its name, among those of `mha` if there are any.

    Changed rows are then compared with an unchanged one. For a row that the user named, the typed
    settings count instead. Of several such rows, the first in name order is returned.
    """
    typed = {row: {*read_typed(members[0].overrides).items()} for row, members in groups.items()}
    common = set.intersection(*typed.values())

    def count_words(row: str) -> int:
        if groups[row][0].name is None:
            return len(row.split())
        return 1 + sum(key != "attn" for key, _ in typed[row] - common)

    rows = [row for row, members in groups.items() if members[0].variant == "mha"]
    return min(rows or groups, key=lambda row: (count_words(row), row))


def make_section(
    groups: Groups,
    baseline: str,
    title_parts: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    more_metrics: Sequence[str] = (),
) -> Section:
    """Return the section of these rows, with all decisions about them.

    Rows are compared with the baseline, then with the leader, the row with the lowest loss. Since
    the leader is picked after seeing the losses, its comparisons are corrected over all pairs of
    variants; its pair with the baseline is not tested again.
    """
    slices = list_slices(m for runs in groups.values() for run in runs for m in run.metrics)
    reported = dict.fromkeys([*REPORTED, *slices, *more_metrics])
    metrics = dict[str, dict[str, Estimate]]()
    for name, runs in groups.items():
        # Over all seeds, also with `sweep.until`: only differences decided how many to run.
        values = {m: [run.metrics[m] for run in runs if m in run.metrics] for m in reported}
        metrics[name] = {m: statistics.estimate(own) for m, own in values.items() if own}
    notes = compare_speeds(groups, baseline, metrics)
    losses = {name: own[LOSS].mean for name, own in metrics.items()}
    fronts = _pareto_fronts(metrics)
    others = [name for name in groups if name != baseline]
    differences = compare_family(groups, baseline, others)
    rows = [
        Row(
            name,
            groups[name],
            metrics[name],
            differences.get(name),
            [cost for cost, front in fronts.items() if name in front],
        )
        for name in [baseline, *sorted(others, key=lambda name: (losses[name], name))]
    ]
    leader = min(rows, key=lambda row: row.loss).name
    if leader == baseline:
        rivals = list(differences.values())
    else:
        tested = max((d.comparisons for d in differences.values()), default=0)
        rest = [name for name in others if name != leader]
        pairs = math.comb(len(others), 2)
        rivals = [
            *compare_family(groups, leader, [baseline], tested).values(),
            *compare_family(groups, leader, rest, pairs).values(),
        ]
    # Two other rows count as different only if one of them differs from the baseline: if all
    # variants are equal, a false claim here requires a false claim against the baseline first.
    shown = {name for name, d in differences.items() if d.is_significant} | {baseline}
    distinct = {d.variant for d in rivals if d.is_significant and shown & {d.variant, leader}}
    return Section(
        title_parts or {},
        baseline,
        rows,
        leader if others else None,
        rivals,
        compare_interactions(pairs_of_parts(groups)),
        [row.name for row in rows if row.name not in {leader, *distinct}],
        [*warnings],
        notes,
    )


def _pareto_fronts(metrics: Mapping[str, Mapping[str, Estimate]]) -> dict[str, set[str]]:
    """Return the rows on the Pareto front of each cost and the loss, or a task's accuracy."""
    task = all(ACCURACY in own for own in metrics.values())
    fronts = {}
    for cost, metric in COSTS.items():
        names = [name for name, own in metrics.items() if metric in own]
        costs = [metrics[name][metric].mean for name in names]
        losses = [-metrics[n][ACCURACY].mean if task else metrics[n][LOSS].mean for n in names]
        fronts[cost] = {names[i] for i in statistics.pareto_front(costs, losses)}
    return fronts
