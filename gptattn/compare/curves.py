"""A run's curves, out of metrics.jsonl: read as it was written, kept small."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptattn.compare.finished_runs import LARGEST, one_line
from gptattn.runs.folder import RunFolder
from gptattn.runs.rows import read_rows

POINTS = 200  # kept per run and curve: more than a plot shows

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Points of one run, all arrays [points], steps rising."""

    step: Floats
    tokens: Floats
    seconds: Floats
    flops: Floats
    loss: Floats  # nats per token
    bits: Floats  # per byte; NaN where the record has none

    def __len__(self) -> int:
        return len(self.step)

    def up_to(self, step: float) -> "Curve":
        table = _columns(self)
        return Curve(*table[:, self.step <= step])


@dataclass(frozen=True)
class Curves:
    """`train/loss` as means over stretches of the run, and `val/loss` as it was measured."""

    train: Curve
    val: Curve
    start: float  # seconds since 1970


Point = tuple[float | None, ...]


def read_curves(folder: Path) -> tuple[Curves, str | None]:
    """The run's curves, and a line on what is wrong with its metrics.jsonl, if anything is.

    Of a damaged file the whole rows before the damage count; of a missing one, none do.
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
    """Step and validation of each budget that the record shows to have come to its end."""
    ends: dict[int, dict[str, float | None]] = {}
    try:
        for row in read_rows(RunFolder(folder)):
            if row.val is not None and row.budget is not None and row.budget >= 1:
                ends[int(row.step or 0)] = {"val/loss": row.val, "val/bits_per_byte": row.bits}
    except (OSError, ValueError, OverflowError):
        pass  # what is wrong with it is told where its curves are read
    return sorted(ends.items())


def _curve(points: list[Point]) -> Curve:
    """Points that are whole, in order; of a step that comes twice, as after a resume, the last."""
    table = np.array(points, dtype=np.float64).reshape(-1, 6)  # None becomes NaN
    # NaN and infinity fail as well. A step must fit TensorBoard's 64 bits, and sums must be finite.
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
    """At most POINTS points, each the mean over a stretch of rows: less noise, no less truth."""
    if len(curve) <= POINTS:
        return curve
    starts = np.linspace(0, len(curve), POINTS, endpoint=False).astype(int)
    sizes = np.diff([*starts, len(curve)])
    return Curve(*(np.add.reduceat(_columns(curve), starts, axis=1) / sizes))


def _thinned(curve: Curve) -> Curve:
    """At most POINTS points, the first and the last among them, none of them changed."""
    if len(curve) <= POINTS:
        return curve
    return Curve(*_columns(curve)[:, np.linspace(0, len(curve) - 1, POINTS).astype(int)])
