"""Sections that are a ladder: sizes of one family of models, each trained on more tokens.

What a variant needs for the same loss, of compute, cache and time, comes from a law through all
sizes; see `scaling.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import Groups
from gptattn.compare.scaling import (
    Ladder,
    Law,
    Multiplier,
    choose_law,
    lack_of_fit,
    multipliers,
    widening,
)
from gptattn.compare.sections import RunSet
from gptattn.compare.statistics import ALPHA

FEWEST_SIZES = 4  # with fewer, the law has nothing left to be wrong about
GROWS = ("model", "budget")  # the axes on which the sections of a ladder differ
BEYOND = 4.0  # times the largest compute: how far the law is extrapolated


@dataclass(frozen=True)
class Scaled:
    """What the losses say of one cost, over all sizes."""

    cost: str  # a key of LADDER_COSTS
    ladder: Ladder
    law: Law
    misfit: float | None  # p that the law holds at every size; None: cannot be told
    widened: float  # the factor by which that widened the intervals
    loss: float  # where the multipliers are given: the highest of the largest size's means, nats
    multipliers: Mapping[str, Multiplier]
    predicted: Mapping[str, float]  # the largest size's losses, from the law of the smaller ones
    measured: Mapping[str, float]
    beyond: Mapping[str, float] | None  # losses at BEYOND times the largest; None: does not hold

    @property
    def shared(self) -> bool:
        """Whether all variants have one exponent, so that a multiplier holds for every loss."""
        return len(set(self.law.exponents.values())) == 1


@dataclass(frozen=True)
class LadderReport:
    """A ladder's sizes, smallest first, and what they say of each cost."""

    where: str  # what parts it from other ladders; "" for the only one
    baseline: str
    sizes: Sequence[str]
    seeds: int
    costs: Sequence[Scaled]


def _tokens(run: Run) -> float:
    return run.steps * int(run.settings["batch_size"]) * int(run.settings["model.context_length"])


def _compute(run: Run) -> float:
    return run.metrics["cost/flops_per_token"] * _tokens(run)


def _cache(run: Run) -> float:
    return run.metrics["cost/kv_bytes_per_token"]


def _seconds(run: Run) -> float:
    return _tokens(run) / run.metrics["perf/tokens_per_s"]


LADDER_COSTS: dict[str, Callable[[Run], float]] = {
    "compute": _compute,
    "cache": _cache,
    "seconds": _seconds,
}


def ladders(sections: Sequence[tuple[RunSet, Groups, str]]) -> list[LadderReport]:
    """Return what each ladder among the sections says; they come smallest first.

    A ladder has FEWEST_SIZES or more sections that differ in model and budget alone, of one
    baseline, which share another row and seeds, and in which the compute grows.
    """
    families: dict[tuple[str, ...], list[tuple[RunSet, Groups, str]]] = {}
    for found, groups, baseline in sections:
        others = [part for axis, part in found.parts.items() if axis not in GROWS]
        families.setdefault((baseline, *others), []).append((found, groups, baseline))
    made = [_report(family) for family in families.values() if len(family) >= FEWEST_SIZES]
    return [report for report in made if report is not None]


def _report(family: Sequence[tuple[RunSet, Groups, str]]) -> LadderReport | None:
    first, _, baseline = family[0]
    sizes = [groups for _, groups, _ in family]
    names = [name for name in sizes[0] if all(name in groups for groups in sizes)]
    seeds = set.intersection(
        *({run.seed for run in groups[name]} for groups in sizes for name in names)
    )
    if baseline not in names or len(names) < 2 or not seeds:
        return None
    cells = {
        name: [[run for run in groups[name] if run.seed in seeds] for groups in sizes]
        for name in names
    }
    costs = [_scaled(cost, cells, baseline) for cost in LADDER_COSTS]
    known = [scaled for scaled in costs if scaled is not None]
    if not known or known[0].cost != "compute":
        return None
    where = [part for axis, part in first.parts.items() if part and axis not in GROWS]
    return LadderReport(
        ", ".join(where), baseline, [found.size for found, *_ in family], len(seeds), known
    )


def _scaled(cost: str, cells: Mapping[str, list[list[Run]]], baseline: str) -> Scaled | None:
    """Return what the runs of each variant and size say of the cost.

    None if the cost does not grow, or if losses do not fall with it, so that there is no law.
    """
    of = LADDER_COSTS[cost]
    try:
        spent = {
            name: np.array([mean(of(run) for run in runs) for runs in sizes])
            for name, sizes in cells.items()
        }
    except (KeyError, ValueError, ZeroDivisionError):  # of a run that lacks a figure
        return None
    if any(np.any(np.diff(own) <= 0) or own[0] <= 0 for own in spent.values()):
        return None
    losses = {
        name: np.array([[run.metrics["val/loss"] for run in runs] for runs in sizes])
        for name, sizes in cells.items()
    }
    ladder = Ladder(spent, losses)
    law = choose_law(ladder)
    misfit, last = lack_of_fit(law, ladder), ladder.sizes - 1
    measured = {name: float(own[last].mean()) for name, own in losses.items()}
    # A loss that every variant has reached.
    reached = max(measured.values())
    times = multipliers(ladder, baseline, reached)
    if not all(math.isfinite(one.value) for one in times.values()):
        return None
    smaller = choose_law(ladder.part(last))
    holds = misfit is not None and misfit >= ALPHA
    return Scaled(
        cost,
        ladder,
        law,
        misfit,
        widening(law, ladder),
        reached,
        times,
        {name: smaller.loss(name, float(spent[name][last])) for name in cells},
        measured,
        {n: law.loss(n, BEYOND * float(spent[n][last])) for n in cells} if holds else None,
    )
