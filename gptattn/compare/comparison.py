"""Makes the Comparison, the source of tables, words, plots and the page.

First what a Comparison holds, then its sections with their rows, then what changes from one section
to another.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame

from gptattn.compare import statistics
from gptattn.compare.differences import (
    OF_BLOCK,
    OPEN,
    WIDTH,
    differences_in_making,
    differences_in_settings,
)
from gptattn.compare.finished_runs import Run, at_first_budgets, read_runs, without_replaced
from gptattn.compare.groups import (
    HELD_AGAINST,
    MATRICES,
    Groups,
    comparable_sets,
    group_runs,
    name_copies,
    pick_baseline,
    rates_differ,
)
from gptattn.compare.ladder import GROWS, LadderReport, report_ladder
from gptattn.compare.statistics import (
    Difference,
    Estimate,
    Interval,
    Paired,
    compare_family,
    compare_pairs,
    pair_by_seed,
    second_minus_first,
)
from gptattn.errors import ConfigError
from gptattn.runs.metrics import BITS, OF_DATA, REPORTED
from gptattn.settings.values import suggest

COSTS = {
    "params": "cost/params",
    "cache": "cost/kv_bytes_per_token",
    "flops": "cost/flops_per_token",
    "speed": "perf/tokens_per_s",
}
# Prefixes of the settings that an axis stands for.
OWN = {
    "block": OF_BLOCK,
    "precision": ("trainer.precision",),
    "optim": (MATRICES,),
    "tokenizer": ("tokenizer.",),
}


@dataclass(frozen=True)
class Row:
    """One variant: runs that differ only in the seed."""

    name: str
    runs: list[Run]
    metrics: dict[str, Estimate]  # those of at least one of its runs
    difference: Difference | None  # to the baseline; None for itself or without a common seed
    speed: tuple[float, Interval] | None  # tokens/s over the baseline's, paired by seed
    fronts: list[str]  # keys of COSTS: the Pareto fronts it is on

    @property
    def n(self) -> int:
        """Number of runs, one per seed."""
        return len(self.runs)

    @property
    def loss(self) -> float:
        """Mean validation loss, nats per token."""
        return self.metrics["val/loss"].mean

    def mean(self, metric: str) -> float | None:
        """Return the metric's mean over the runs; None if no run has it."""
        return self.metrics[metric].mean if metric in self.metrics else None


@dataclass(frozen=True)
class Section:
    """Rows that can be compared with each other."""

    parts: Mapping[str, str]  # how it differs from the other sections, by axis; "": it does not
    baseline: str
    rows: list[Row]  # the baseline first, the others by loss
    leader: str | None  # the row with the lowest mean loss; None with one row
    rivals: list[Difference]  # of each other row to the leader
    alike: list[str]  # rows not shown to differ from the leader
    warnings: list[str]

    @property
    def title(self) -> str:
        """How it differs from the other sections; "" for the only one."""
        return self.title_without()

    def title_without(self, *axes: str) -> str:
        """Return the title without these axes: equal if sections differ in nothing else."""
        return ", ".join(part for axis, part in self.parts.items() if part and axis not in axes)

    @property
    def groups(self) -> Groups:
        """The runs of each row, by name."""
        return {row.name: row.runs for row in self.rows}


@dataclass(frozen=True)
class Change:
    """A figure in two sections: means over the common seeds, second minus first."""

    first: float
    second: float
    difference: Difference


@dataclass(frozen=True)
class Across:
    """What changes between two sections that differ in one setting only, by row name.

    Each of the two families has its own correction. Between tokenizers the baseline may be the only
    row, and then there are no gaps.
    """

    setting: str  # the axis of sections.AXES
    where: str  # what else distinguishes these two from other sections; "" for nothing
    first: str  # the first section's title, in this setting
    second: str
    baseline: str  # of both
    losses: Mapping[str, Change]  # of the common rows: the baseline, then by first loss
    gaps: Mapping[str, Change]  # loss minus the baseline's
    others: list[str]  # other settings that differ between the two sections' rows
    metric: str = "val/loss"  # of `losses`, in nats; val/bits_per_byte between tokenizers
    token_bytes: tuple[float, float] | None = None  # of each tokenizer


@dataclass(frozen=True)
class Comparison:
    """The whole report."""

    folders: list[str]
    sections: list[Section]
    warnings: list[str]
    skipped: list[str]
    across: list[Across] = field(default_factory=list)
    ladders: list[LadderReport] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """All runs, each once: an extended run may be in several sections."""
        runs = [run for section in self.sections for row in section.rows for run in row.runs]
        return list({(run.folder, run.until): run for run in runs}.values())

    def table(self) -> DataFrame:
        """Return a pandas DataFrame with one row per variant and section, as in comparison.csv.

        A metric's column is its mean over `n` seeds, with its 95% interval beside it. `difference`
        is the mean of the paired differences to `baseline` over `paired n` seeds; its interval and
        p have a Bonferroni correction over `comparisons`.
        """
        rows = [(section, row) for section in self.sections for row in section.rows]
        known = set[str]().union(*(row.metrics for _, row in rows))
        metrics = [metric for metric in REPORTED if metric in known or metric not in OF_DATA]
        table = DataFrame([_table_row(section, row, metrics) for section, row in rows])
        whole = ("paired n", "comparisons", "seeds needed")
        return table.astype(dict.fromkeys(whole, "Int64"))


def _table_row(section: Section, row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    line: dict[str, Any] = {"section": section.title, "variant": row.name, "n": row.n}
    for metric in metrics:
        estimate = row.metrics.get(metric)
        low, high = (estimate and estimate.interval) or (None, None)
        line[metric] = estimate and estimate.mean
        line |= {f"{metric} low": low, f"{metric} high": high}
    d = row.difference
    low, high = (d and d.interval) or (None, None)
    return line | {
        "baseline": section.baseline,
        "paired n": d and d.n,
        "difference": d and d.mean,
        "difference low": low,
        "difference high": high,
        "p": d and d.p,
        "comparisons": d and d.comparisons,
        "seeds needed": d and d.seeds_needed,
        "pareto": " ".join(row.fronts),
    }


def load_comparison(
    *folders: str | Path, baseline: str | None = None, split: bool = False
) -> Comparison:
    """Return the comparison of the finished runs in these folders, by default in `outputs`.

    It takes the command's arguments. Raises DataError without a finished run, ConfigError if the
    runs cannot be compared.
    """
    paths = [str(folder) for folder in folders] or ["outputs"]
    runs, skipped = read_runs(paths)
    return compare(runs, folders=paths, baseline=baseline, split=split, skipped=skipped)


def compare(
    runs: Sequence[Run],
    *,
    folders: Sequence[str] = (),
    baseline: str | None = None,
    split: bool = False,
    skipped: Sequence[str] = (),
) -> Comparison:
    """Compare the runs.

    `folders` and `skipped` are only recorded. `baseline` is a row or variant name, by default
    `mha`. With `split`, runs that differ in text or validation get sections of their own. Without
    `split` it raises ConfigError for such runs, as for an unknown baseline.
    """
    runs, extended = at_first_budgets(runs)
    runs, replaced = without_replaced(runs)
    sets = comparable_sets(runs, split)
    grouped = [group_runs(found.runs) for found in sets]
    picked = [pick_baseline(groups, baseline) for groups in grouped]
    if not any(picked):
        names = {name for groups in grouped for name in groups}
        message = f"{baseline!r} is not a row of the report; {suggest(baseline or '', names)}"
        raise ConfigError("--baseline", message)
    sections, copies = list[Section](), dict[str, None]()
    for found, groups, name in zip(sets, grouped, picked, strict=True):
        row = name or pick_baseline(groups, None)
        assert row is not None
        warnings = differences_in_settings(groups, row, own_rates=rates_differ(groups))
        if name is None:
            warnings.append(f"{baseline} is not among these runs; the baseline here is {row}")
        sections.append(make_section(groups, row, found.parts, warnings))
        copies |= dict.fromkeys(name_copies(found.runs, groups))
    comparison = Comparison(
        list(folders),
        sections,
        differences_in_making(runs),
        [*skipped, *replaced, *copies],
        compare_across(sections),
        find_ladders(sections),
    )
    # Only the newest run of a seed is shown: drop the notes on the others.
    shown = {run.folder for run in comparison.runs}
    notes = [note for folder, note in extended.items() if folder in shown]
    return replace(comparison, warnings=[*notes, *comparison.warnings])


def make_section(
    groups: Groups,
    baseline: str,
    parts: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
) -> Section:
    """Return the section of these rows: all decisions about them; `parts` make its title."""
    others = [name for name in groups if name != baseline]
    against = [(baseline, name) for name in others]
    differences = {d.variant: d for d in compare_pairs(groups, against)}
    rows = [
        Row(
            name,
            members,
            estimate_metrics(members),
            differences.get(name),
            _speed(members, groups[baseline], len(others)) if name != baseline else None,
            [],
        )
        for name, members in groups.items()
    ]
    rows.sort(key=lambda row: (row.name != baseline, row.loss, row.name))
    leader = min(rows, key=lambda row: row.loss).name
    rivals = _rivals(groups, leader, baseline, differences)
    distinct = _distinct_from_leader(rivals, baseline, differences)
    return Section(
        parts or {},
        baseline,
        _with_fronts(rows),
        leader if others else None,
        rivals,
        [row.name for row in rows if row.name not in (leader, *distinct)],
        list(warnings),
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
    # The leader is picked after seeing the losses, so correct over all pairs of variants.
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
    """Return the difference with variant and baseline swapped."""
    interval = None if d.interval is None else (-d.interval[1], -d.interval[0])
    return replace(d, variant=d.baseline, baseline=d.variant, mean=0.0 - d.mean, interval=interval)


def estimate_metrics(members: Sequence[Run]) -> dict[str, Estimate]:
    """Return the mean and interval of each of REPORTED that one of the runs has."""
    found = {}
    for metric in REPORTED:
        (values,) = pair_by_seed([members], metric).values
        if len(values):
            # Over all seeds, with `sweep.until` too: only differences decided how many there are.
            interval = statistics.t_interval(values)
            found[metric] = Estimate(len(values), float(values.mean()), interval)
    return found


def _speed(
    members: Sequence[Run], base: Sequence[Run], comparisons: int
) -> tuple[float, Interval] | None:
    """Return the geometric mean of the paired tokens/s ratios and the t interval of their logs.

    Return None with fewer than two common seeds or a speed of 0.
    """
    ours, theirs = pair_by_seed([members, base], "perf/tokens_per_s").values
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


def find_ladders(sections: Sequence[Section]) -> list[LadderReport]:
    """Return what each ladder says: sections that differ in GROWS alone, smallest first."""
    families: dict[tuple[str, str], list[Section]] = {}
    for section in sections:
        key = section.baseline, section.title_without(*GROWS)
        families.setdefault(key, []).append(section)
    found = [
        report_ladder(where, baseline, [(each.parts.get("model", ""), each.groups) for each in own])
        for (baseline, where), own in families.items()
    ]
    return [report for report in found if report is not None]


def compare_across(sections: Sequence[Section]) -> list[Across]:
    """Return one Across per pair of sections that can be compared.

    They differ in one of HELD_AGAINST only, have the same baseline, and share another row. Between
    tokenizers the baseline is enough: no section has both.
    """
    found = [_across(first, second) for first, second in combinations(sections, 2)]
    return [across for across in found if across is not None]


def _across(one: Section, other: Section) -> Across | None:
    axes = [axis for axis, part in one.parts.items() if part != other.parts[axis]]
    if len(axes) != 1 or axes[0] not in HELD_AGAINST or one.baseline != other.baseline:
        return None
    (axis,), baseline, before, after = axes, one.baseline, one.groups, other.groups
    tokenizers = axis == "tokenizer"
    runs = [run for members in (*before.values(), *after.values()) for run in members]
    if tokenizers and not all("val_bytes" in run.data for run in runs):
        return None
    metric = BITS if tokenizers else "val/loss"
    # The baseline first, then by loss, as in the first section.
    shared = [name for name in before if name in after]
    losses = {name: pair_by_seed([before[name], after[name]], metric) for name in shared}
    gaps = {
        name: pair_by_seed(
            [before[name], before[baseline], after[name], after[baseline]], metric
        ).of(_gaps)
        for name in shared
        if name != baseline
    }
    title, its_title = (each.parts[axis] or f"another {axis}" for each in (one, other))
    changes, changed = _changes(losses, title), _changes(gaps, baseline)
    if not (changes if tokenizers else changed):
        return None
    return Across(
        axis,
        one.title_without(axis),
        title,
        its_title,
        baseline,
        changes,
        changed,
        _others(axis, [(before[name][0].settings, after[name][0].settings) for name in shared]),
        metric,
        _token_bytes(before[baseline][0], after[baseline][0]) if tokenizers else None,
    )


def _token_bytes(*runs: Run) -> tuple[float, float] | None:
    """Return the bytes per held-out token of each of two runs; None if unknown."""
    bits = [run.metrics["val/loss"] / math.log(2) for run in runs]
    per_byte = [run.metrics.get(BITS, 0.0) for run in runs]
    if not all(per_byte):
        return None
    first, second = (a / b for a, b in zip(bits, per_byte, strict=True))
    return first, second


def _gaps(losses: np.ndarray) -> np.ndarray:
    """Return the row's losses minus the baseline's: [4, n] -> [2, n]."""
    return losses[0::2] - losses[1::2]


def _changes(found: Mapping[str, Paired], reference: str) -> dict[str, Change]:
    """Return the changes from the first to the second of each row's values [2, n]."""
    pairs = {(reference, name): own.of(second_minus_first) for name, own in found.items()}
    means = {name: own.values.mean(axis=1) for name, own in found.items() if own.values.size}
    return {
        d.variant: Change(float(means[d.variant][0]), float(means[d.variant][1]), d)
        for d in compare_family(pairs)
    }


def _others(axis: str, rows: Iterable[tuple[Mapping[str, str], Mapping[str, str]]]) -> list[str]:
    """Return what else differs in the two settings of a row: a group with files, or a setting."""
    found = set()
    for before, after in rows:
        keys = {key for key in {*before, *after} if before.get(key) != after.get(key)}
        # Sections agree in width, except where `match` chose it.
        found |= {key for key in keys if key != WIDTH and not key.startswith(OWN[axis])}
    return sorted({key.split(".")[0] if key.startswith(OPEN) else key for key in found})
