"""Reads a run's loss curves from metrics.jsonl row by row, and reduces them to POINTS points."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptattn.compare.finished_runs import LARGEST, one_line
from gptattn.runs.folder import RunFolder
from gptattn.runs.rows import read_rows

POINTS = 400  # kept per run and curve: twice what a plot shows, for a closer look on the page

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A loss curve of one run; all arrays are [points], and steps increase."""

    step: Floats
    tokens: Floats
    seconds: Floats
    flops: Floats
    loss: Floats  # nats per token
    bits: Floats  # per byte; NaN where the record has none

    def __len__(self) -> int:
        return len(self.step)

    def up_to(self, step: float) -> "Curve":
        """Return the points up to and including `step`."""
        table = _columns(self)
        return Curve(*table[:, self.step <= step])


@dataclass(frozen=True)
class Curves:
    """`train/loss` averaged over stretches of the run, and `val/loss` as it was measured."""

    train: Curve
    val: Curve
    start: float  # seconds since 1970


Point = tuple[float | None, ...]


def read_curves(folder: Path) -> tuple[Curves, str | None]:
    """Return the run's curves, and a warning if its metrics.jsonl is damaged or missing.

    Rows before the damage are kept. A missing file gives empty curves.
    """
    train: list[Point] = []
    val: list[Point] = []
    start, damage = math.nan, None
    try:
        for row in read_rows(RunFolder(folder)):
            if math.isnan(start) and row.time is not None:
                start = row.time
            if row.train is not None:
                train.append((row.step, row.tokens, row.seconds, row.flops, row.train, math.nan))
            if row.val is not None:
                val.append((row.step, row.tokens, row.seconds, row.flops, row.val, row.bits))
    except FileNotFoundError:
        damage = "has no metrics.jsonl: no curves"
    except OSError as error:
        damage = f"metrics.jsonl: {error.strerror}: no curves"
    except ValueError as error:
        damage = str(error)
    curves = Curves(_resampled(_curve(train)), _thinned(_curve(val)), start)
    return curves, damage and one_line(f"{folder}: {damage}")


def budget_ends(folder: Path) -> list[tuple[int, dict[str, float | None]]]:
    """Return the step and validation metrics at the end of each finished budget.

    Read from metrics.jsonl; what cannot be read is left out.
    """
    ends: dict[int, dict[str, float | None]] = {}
    try:
        for row in read_rows(RunFolder(folder)):
            if row.val is not None and row.budget is not None and row.budget >= 1:
                ends[int(row.step or 0)] = {"val/loss": row.val, "val/bits_per_byte": row.bits}
    except (OSError, ValueError, OverflowError):
        pass  # `read_curves` reports what is wrong with the file
    return sorted(ends.items())


def _curve(points: list[Point]) -> Curve:
    """Return the complete points by step; the last one if a step is repeated after a resume."""
    table = np.array(points, dtype=np.float64).reshape(-1, 6)  # None becomes NaN
    # Also drops NaN and infinity. A step must fit TensorBoard's 64 bits, and sums must be finite.
    table = table[(np.abs(table[:, :5]) < LARGEST).all(axis=1) & (table[:, 0] < 2**53)]
    table[~(np.abs(table[:, 5]) < LARGEST), 5] = np.nan
    if len(table) and (np.diff(table[:, 0]) <= 0).any():
        _, first = np.unique(table[::-1, 0], return_index=True)
        table = table[::-1][first]
    return Curve(*table.T)


def _columns(curve: Curve) -> Floats:
    names = ("step", "tokens", "seconds", "flops", "loss", "bits")
    return np.stack([getattr(curve, name) for name in names])


def _resampled(curve: Curve) -> Curve:
    """Return at most POINTS points, each the mean over a stretch of rows."""
    if len(curve) <= POINTS:
        return curve
    starts = np.linspace(0, len(curve), POINTS, endpoint=False).astype(int)
    sizes = np.diff([*starts, len(curve)])
    return Curve(*(np.add.reduceat(_columns(curve), starts, axis=1) / sizes))


def _thinned(curve: Curve) -> Curve:
    """Return at most POINTS of the points, including the first and the last, unchanged."""
    if len(curve) <= POINTS:
        return curve
    return Curve(*_columns(curve)[:, np.linspace(0, len(curve) - 1, POINTS).astype(int)])
