"""What the runs of an experiment show: orders, differences, distances. Numbers, no words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

import numpy as np

from gptattn.compare import statistics
from gptattn.compare.comparison import compare_all, compare_pairs
from gptattn.compare.curves import read_curves
from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import Groups
from gptattn.compare.results import Difference
from gptattn.compare.uptrain.experiment import Experiment

USABLE = 0.5  # of the original's steps: where it was then is what a usable model reaches
FEWEST_SEEDS = 2  # of which a test can be made


@dataclass(frozen=True)
class Order:
    """Whether loss rises from method to method, as the paper has it, for one target and share."""

    target: str
    steps: int
    methods: list[str]  # in the paper's order
    means: list[float]  # of val/loss, over the seeds that all methods have
    n: int
    holds: int  # seeds in which the order holds strictly
    p: float | None  # Page's; None below three methods or two seeds
    p_holm: float | None  # over all targets and shares
    neighbours: list[Difference]  # each method against the one before it, corrected likewise

    @property
    def in_order(self) -> bool:
        """Whether the means are in the paper's order."""
        return all(a < b for a, b in pairwise(self.means))

    @property
    def shown(self) -> bool:
        return self.in_order and self.p_holm is not None and self.p_holm < statistics.ALPHA


@dataclass(frozen=True)
class Converted:
    """A target right after conversion by the first method, nothing trained."""

    target: str
    method: str
    loss: float
    difference: Difference  # to the originals
    as_after: float | None  # steps of the original after which it had this loss; None: before any


@dataclass(frozen=True)
class Findings:
    orders: list[Order]
    converted: list[Converted]
    usable_loss: float | None  # the originals' mean loss after USABLE of their steps
    rivals: list[Difference]  # each converted target against the first
    scratch: dict[str, list[tuple[int, Difference]]]  # uptrained against from scratch, by target


def find(experiment: Experiment) -> Findings:
    """All that the report says of an experiment."""
    method = experiment.methods[0]
    groups = {
        target: experiment.cells[target, method, 0]
        for target in experiment.targets
        if (target, method, 0) in experiment.cells
    }
    return Findings(
        _orders(experiment),
        _converted(experiment, groups, method),
        _original_loss(experiment, USABLE),
        compare_all(groups, list(groups)[1:], next(iter(groups))) if len(groups) > 1 else [],
        _against_scratch(experiment),
    )


def losses(members: Sequence[Sequence[Run]]) -> tuple[list[int], np.ndarray]:
    """The seeds that all members have, and their losses [seeds, members]."""
    by_seed = [{run.seed: run.metrics["val/loss"] for run in runs} for runs in members]
    seeds = sorted(set.intersection(*(set(found) for found in by_seed)))
    table = [[found[seed] for found in by_seed] for seed in seeds]
    return seeds, np.array(table, dtype=np.float64).reshape(len(seeds), len(by_seed))


def _orders(experiment: Experiment) -> list[Order]:
    places = {(target, steps) for target, _, steps in experiment.cells}
    # Every pair of neighbours, wherever it is: one sentence counts those that differ.
    m = len(experiment.cells) - len(places)
    orders = [
        order
        for target in experiment.targets
        for steps in experiment.steps
        if (order := _order(experiment, target, steps, m)) is not None
    ]
    tested = [order for order in orders if order.p is not None]
    corrected = iter(statistics.holm([order.p for order in tested if order.p is not None]))
    return [o if o.p is None else replace(o, p_holm=next(corrected)) for o in orders]


def _order(experiment: Experiment, target: str, steps: int, comparisons: int) -> Order | None:
    methods = [m for m in experiment.methods if (target, m, steps) in experiment.cells]
    if len(methods) < 2:
        return None
    groups = {method: experiment.cells[target, method, steps] for method in methods}
    seeds, table = losses(list(groups.values()))
    if not seeds:
        return None
    testable = len(methods) > 2 and len(seeds) >= FEWEST_SEEDS
    return Order(
        target,
        steps,
        methods,
        table.mean(axis=0).tolist(),
        n=len(seeds),
        holds=int((np.diff(table, axis=1) > 0).all(axis=1).sum()),
        p=statistics.order_p(table) if testable else None,
        p_holm=None,
        neighbours=compare_pairs(groups, list(pairwise(methods)), comparisons),
    )


def _converted(experiment: Experiment, groups: Groups, method: str) -> list[Converted]:
    """Each target of `groups`, right after conversion."""
    source = {experiment.source: experiment.originals}
    found = []
    for difference in compare_all(source | groups, list(groups), experiment.source):
        target = difference.variant
        loss = mean(run.metrics["val/loss"] for run in groups[target])
        as_after = _steps_to(experiment, loss)
        found.append(Converted(target, method, loss, difference, as_after))
    return found


def _mean_curve(experiment: Experiment) -> tuple[np.ndarray, np.ndarray]:
    """Steps and the originals' mean validation loss there, [points]; empty where they differ."""
    curves = [read_curves(run.folder)[0].val for run in experiment.originals]
    steps = [curve.step for curve in curves]
    if any(len(s) != len(steps[0]) or (s != steps[0]).any() for s in steps):
        return np.array([]), np.array([])
    return steps[0], np.mean([curve.loss for curve in curves], axis=0)


def _original_loss(experiment: Experiment, share: float) -> float | None:
    steps, loss = _mean_curve(experiment)
    at = share * experiment.original_steps
    return float(np.interp(at, steps, loss)) if len(steps) and steps[0] <= at else None


def _steps_to(experiment: Experiment, loss: float) -> float | None:
    """Steps after which the originals first had this loss, between two validations as on a line."""
    steps, curve = _mean_curve(experiment)
    below = np.flatnonzero(curve <= loss)
    if not len(below) or below[0] == 0:
        return None if len(below) or not len(steps) else float(steps[-1])
    i = int(below[0])
    part = (curve[i - 1] - loss) / (curve[i - 1] - curve[i])
    return float(steps[i - 1] + part * (steps[i] - steps[i - 1]))


def _against_scratch(experiment: Experiment) -> dict[str, list[tuple[int, Difference]]]:
    """The first method's runs against those from scratch, for each target and share of steps."""
    method = experiment.methods[0]
    cells = {
        target: {
            f"{steps}": experiment.cells[target, method, steps]
            for steps in experiment.steps
            if steps and (target, method, steps) in experiment.cells
        }
        for target in experiment.targets
        if experiment.scratch[target]
    }
    m = sum(map(len, cells.values()))
    found = {
        target: compare_all(
            {"scratch": experiment.scratch[target], **groups}, list(groups), "scratch", m
        )
        for target, groups in cells.items()
    }
    return {target: [(int(d.variant), d) for d in of] for target, of in found.items()}
