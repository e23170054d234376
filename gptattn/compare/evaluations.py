"""What evaluations of a section's runs say over seeds: loss by position, and by cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptattn.compare.bands import Band, band
from gptattn.compare.finished_runs import LARGEST, one_line
from gptattn.compare.results import Estimate, Row, Section
from gptattn.compare.statistics import t_interval
from gptattn.runs.evaluation import Bin, Evaluation, LengthLoss

MOST = 100  # lengths and caches of a run that are shown


@dataclass(frozen=True)
class PositionLoss:
    """A row's loss in windows of one length, over its runs that were evaluated so."""

    variant: str
    length: int
    trained: int  # the context of training
    windows: int
    loss: Estimate  # mean over all positions
    bins: list[tuple[int, int, Estimate]]  # first and last context, and the loss there


@dataclass(frozen=True)
class CacheCost:
    """A row's loss through one cache; `change` is to the full cache of the same run."""

    variant: str
    cache: str
    bytes_per_token: float
    loss: Estimate
    change: Estimate | None  # None for the full cache


def evaluated(row: Row) -> list[Evaluation]:
    """Return the evaluations of the row's runs whose weights are those that are compared."""
    found = [(run.evaluation, run.steps) for run in row.runs]
    return [one for one, steps in found if one and one.step == steps and _is_sound(one)]


def _is_sound(found: Evaluation) -> bool:
    """Whether the file can be shown: anybody may have written it."""
    lengths, caches = found.lengths, found.caches.values()
    losses = [one.loss for one in (*lengths.values(), *caches)]
    losses += [one.loss for length in lengths.values() for one in length.bins]
    sizes = [found.context_length, *(one.nbytes for one in caches)]
    return (
        len(lengths) + len(caches) <= MOST
        and all(abs(x) < LARGEST for x in losses)
        and all(0 < n < LARGEST for n in sizes)
        and all(_tiled(one.bins, length, found.context_length) for length, one in lengths.items())
    )


def _tiled(bins: Sequence[Bin], length: int, trained: int) -> bool:
    """Whether the bins follow each other from 1 to the length, with an edge at the trained one."""
    ends = [0, *(one.last for one in bins)]
    follow = all(ends[i] + 1 == one.first <= one.last for i, one in enumerate(bins))
    return follow and ends[-1] == length < LARGEST and (length <= trained or trained in ends)


def shown_lengths(section: Section) -> list[tuple[int, int]]:
    """Return the lengths that are drawn, each with the trained one.

    They are the trained length, and the longest beyond it. A longer length has fewer windows, over
    which the mean is another, so that each has a plot of its own.
    """
    pairs = {(one.length, one.trained) for one in position_losses(section)}
    drawn = [pair for pair in pairs if pair[0] == pair[1]]
    return sorted(drawn) + sorted(pair for pair in pairs if pair[0] > pair[1])[-1:]


def position_losses(section: Section) -> list[PositionLoss]:
    """Return every row's losses by position, shorter windows first."""
    found = []
    for row in section.rows:
        evaluations = evaluated(row)
        for length in sorted({length for one in evaluations for length in one.lengths}):
            members = _members(evaluations, length)
            bins = [
                (one.first, one.last, _estimate([m.bins[i].loss for m in members]))
                for i, one in enumerate(members[0].bins)
            ]
            trained, windows = evaluations[0].context_length, members[0].windows
            loss = _estimate([m.loss for m in members])
            found.append(PositionLoss(row.name, length, trained, windows, loss, bins))
    return found


def position_bands(section: Section, length: int) -> dict[str, Band]:
    """Return the band of each row evaluated in windows of `length`: loss by tokens of context."""
    found = {}
    for row in section.rows:
        members = [one for one in _members(evaluated(row), length) if one.bins]
        if not members:
            continue
        # The middle of a bin.
        x = np.array([(one.first + one.last) / 2 for one in members[0].bins])
        made = band([x] * len(members), [_losses(member.bins) for member in members])
        if made is not None:
            found[row.name] = made
    return found


def cache_costs(section: Section) -> list[CacheCost]:
    """Return every row's losses by cache, large caches first; [] if only full ones are known.

    Only runs count that have the full cache as well.
    """
    found = []
    for row in section.rows:
        members = [one for one in evaluated(row) if "full" in one.caches]
        sizes = {name: one.nbytes for member in members for name, one in member.caches.items()}
        for cache in sorted(sizes, key=lambda name: -sizes[name]):
            some = [one for one in members if cache in one.caches]
            loss = [one.caches[cache].loss for one in some]
            change = [one.caches[cache].loss - one.caches["full"].loss for one in some]
            each = some[0].bytes_per_token(cache)
            changed = None if cache == "full" else _estimate(change)
            found.append(CacheCost(row.name, one_line(cache), each, _estimate(loss), changed))
    return found if any(one.change is not None for one in found) else []


def _members(evaluations: Sequence[Evaluation], length: int) -> list[LengthLoss]:
    """Return the losses at this length of the runs whose bins are those of the first of them."""
    found = [one.lengths[length] for one in evaluations if length in one.lengths]
    return [one for one in found if _edges(one.bins) == _edges(found[0].bins)]


def _edges(bins: Sequence[Bin]) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in bins]


def _losses(bins: Sequence[Bin]) -> np.ndarray:
    return np.array([one.loss for one in bins])


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(len(values), float(np.mean(values)), t_interval(values))
