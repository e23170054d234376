"""A run's losses over training, their mean over seeds, and losses by context and by cache.

Losses over training come from metrics.jsonl; gptattn-evaluate measured those by context and cache.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, concat

from gptattn.compare.comparison import Row, Section
from gptattn.compare.finished_runs import LARGEST, one_line, read_runs
from gptattn.compare.statistics import Estimate, critical_t, estimate
from gptattn.runs.evaluation import Evaluation
from gptattn.runs.folder import RunFolder
from gptattn.runs.metrics import LOSS, SLICE, TRAIN_LOSS
from gptattn.runs.rows import read_metrics

Floats = NDArray[np.float64]

NAMES = {
    "step": "step",
    "progress/tokens": "tokens",
    "progress/flops": "flops",
    TRAIN_LOSS: "train",
    LOSS: "val",
}
COLUMNS = ["step", "tokens", "flops", "loss"]
POINTS = 400  # per run's training loss, and per mean over seeds with different points
# For two seeds the band would be 12.7 / sqrt(2) deviations, and fill the plot.
MIN_FOR_BAND = 3
MIN_VALIDATIONS = 4  # with fewer points, plot the training loss instead


# A run's loss curves, `train` and `val`: DataFrames with the columns COLUMNS, by increasing step.
Curves = Mapping[str, DataFrame]


def read_curves(folder: Path) -> tuple[Curves, str | None]:
    """Return the run's curves, and a warning if its metrics.jsonl is damaged or missing.

    `train` is averaged over stretches of the run; `val` is as measured. Rows before the damage
    count. A missing file gives empty curves.
    """
    metrics, damage = read_metrics(RunFolder(folder))
    table = metrics.pivot(index="step", columns="metric", values="value").reset_index()
    table = table.reindex(columns=[*NAMES]).rename(columns=NAMES).astype(np.float64)
    both = [table.rename(columns={kind: "loss"}).filter(COLUMNS) for kind in ("train", "val")]
    # Only complete points, without NaN and infinity.
    train, val = (curve.loc[(curve.abs() < LARGEST).all(axis=1)] for curve in both)
    stretches = np.arange(len(train)) * POINTS // max(POINTS, len(train))
    curves = {"train": train.groupby(stretches).mean(), "val": val}
    return curves, damage and one_line(f"{folder}: {damage}")


def load_curves(*folders: str | Path) -> DataFrame:
    """Return what the finished runs at or below the folders recorded over training.

    A pandas DataFrame with one row per run, step and metric: `run` (its folder, as in `load_runs`),
    `variant`, `seed`, `step`, `metric`, `value`. `attrs["skipped"]` has a line per folder that was
    skipped or is damaged; rows before the damage count. Raises DataError if a path is not a folder
    or no finished run is found.
    """
    runs, skipped = read_runs(folders)
    columns = ["run", "variant", "seed", "step", "metric", "value"]
    tables: list[DataFrame] = []
    for run in runs:
        table, damage = read_metrics(RunFolder(run.folder))
        skipped += [one_line(f"{run.folder}: {damage}")] if damage else []
        names = {"run": str(run.folder), "variant": run.variant, "seed": run.seed}
        tables.append(table.assign(**names).reindex(columns=columns))
    found = concat(tables or [DataFrame(columns=columns)], ignore_index=True)
    found.attrs["skipped"] = skipped
    return found


@dataclass(frozen=True)
class Band:
    """Mean curve and 95% interval over seeds, arrays [points].

    With fewer than MIN_FOR_BAND seeds, `low` and `high` are the lowest and highest seed.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    seeds: Floats  # [n, points]


def average_curves(curves: Sequence[tuple[Floats, Floats]]) -> Band | None:
    """Return the mean and Student's 95% interval of curves (x, y) over the x range that all share.

    Curves are interpolated linearly. Return None if they share no range.
    """
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return None
    xs = [x for x, _ in curves]
    start, end = max(x[0] for x in xs), min(x[-1] for x in xs)
    if start > end:
        return None
    same = all(np.array_equal(x, xs[0]) for x in xs)
    grid = xs[0] if same else np.linspace(start, end, POINTS)
    seeds = np.stack([np.interp(grid, x, y) for x, y in curves])
    n, mean = len(seeds), seeds.mean(axis=0)
    if n < MIN_FOR_BAND:
        return Band(grid, mean, seeds.min(axis=0), seeds.max(axis=0), seeds)
    half = critical_t(n) * seeds.std(axis=0, ddof=1) / math.sqrt(n)
    return Band(grid, mean, mean - half, mean + half, seeds)


def choose_curves(section: Section, curves: Mapping[Path, Curves]) -> str:
    """Return `val` if every run with curves has MIN_VALIDATIONS validations, else `train`."""
    members = [curves[run.folder] for row in section.rows for run in row.runs]
    counts = [len(each["val"]) for each in members if any(map(len, each.values()))]
    return "val" if counts and min(counts) >= MIN_VALIDATIONS else "train"


def average_rows(
    section: Section, curves: Mapping[Path, Curves], kind: str, axis: str
) -> dict[str, Band]:
    """Return the band of each row with curves of this kind, val or train, over this axis."""
    found = {}
    for row in section.rows:
        members = [curves[run.folder][kind] for run in row.runs]
        band = average_curves([(one[axis].to_numpy(), one["loss"].to_numpy()) for one in members])
        if band is not None:
            found[row.name] = band
    return found


def accuracies_by_length(section: Section) -> dict[str, Band]:
    """Return the band of each row's accuracy over the lengths at which the task was tested."""
    found = {}
    for row in section.rows:
        lengths = sorted(int(n) for m in row.metrics if (n := m.removeprefix(SLICE)).isdecimal())
        own = [[run.metrics[f"{SLICE}{n}"] for n in lengths] for run in row.runs]
        band = average_curves([(np.array(lengths, np.float64), np.array(one)) for one in own])
        if band is not None:
            found[row.name] = band
    return found


@dataclass(frozen=True)
class PositionLoss:
    """A row's loss in windows of one length, over the runs evaluated that way."""

    variant: str
    length: int
    trained: int  # the training context
    loss: Estimate  # mean over all positions
    beyond: Estimate | None  # mean over positions with more context than in training
    band: Band  # of the losses in bins of context, over the middle of each bin


@dataclass(frozen=True)
class CacheCost:
    """A row's loss through one cache; `change` is from the full cache of the same run."""

    variant: str
    cache: str
    bytes_per_token: float
    loss: Estimate
    change: Estimate | None  # None for the full cache


def list_evaluations(row: Row) -> list[Evaluation]:
    """Return the evaluations of the row's runs, if they are of the weights that are compared."""
    found = [(run.evaluation, run.steps) for run in row.runs]
    return [one for one, steps in found if one and one.step == steps]


def position_losses(section: Section) -> list[PositionLoss]:
    """Return every row's losses by position, shorter windows first."""
    found = []
    for row in section.rows:
        evaluations = list_evaluations(row)
        for length in sorted({length for one in evaluations for length in one.lengths}):
            members = [one.lengths[length] for one in evaluations if length in one.lengths]
            trained = evaluations[0].context_length
            middles = np.array([(one.first + one.last) / 2 for one in members[0].bins])
            losses = [np.array([each.loss for each in one.bins]) for one in members]
            band = average_curves([(middles, loss) for loss in losses])
            if band is None:
                continue
            loss = estimate([one.loss for one in members])
            beyond = None
            if length > trained:
                beyond = estimate([one.between(trained + 1, length) for one in members])
            found.append(PositionLoss(row.name, length, trained, loss, beyond, band))
    return found


def cache_costs(section: Section) -> list[CacheCost]:
    """Return every row's losses by cache, large caches first; [] if only full caches are known.

    Only runs that were also evaluated with the full cache count.
    """
    found = []
    for row in section.rows:
        members = [one for one in list_evaluations(row) if "full" in one.caches]
        sizes = {name: one.nbytes for member in members for name, one in member.caches.items()}
        for cache in sorted(sizes, key=lambda name: -sizes[name]):
            some = [one for one in members if cache in one.caches]
            losses = [one.caches[cache].loss for one in some]
            changes = [one.caches[cache].loss - one.caches["full"].loss for one in some]
            change = None if cache == "full" else estimate(changes)
            each = some[0].bytes_per_token(cache)
            found.append(CacheCost(row.name, one_line(cache), each, estimate(losses), change))
    return found if any(one.change is not None for one in found) else []
