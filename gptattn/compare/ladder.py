"""Ladders: sizes of one family of models, and what a variant needs for the same loss.

Sections that differ only in model and budget, each with more compute, are a ladder. A law is fitted
to its mean losses, L = E + A * C^-alpha (Hoffmann et al. 2022, arXiv:2203.15556, sec. 3.3, here of
compute, cache or seconds alone). All variants share E, the loss that no compute removes; each has
its own A; alpha is shared unless the losses say otherwise. The file reads downwards:
the law, the multipliers with their intervals, ladders in a report, and their words. scipy is
imported inside the functions, as in `statistics.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import Groups
from gptattn.compare.statistics import ALPHA, Interval
from gptattn.runs.metrics import CACHE, FLOPS, LOSS, SPEED

Array = NDArray[np.float64]
EXPONENTS = (0.005, 2.0)  # searched
GRID = 24  # exponents tried before the search is refined
MIN_SIZES = 4  # with fewer, the law fits whatever the losses
GROWS = ("model", "budget")  # the axes on which the sections of a ladder differ
BEYOND = 4.0  # times the largest compute: how far the law is extrapolated
MAX_TIMES = 1_000  # a variant that needs more times as much as the baseline has not learned
MAX_LOG = math.log(MAX_TIMES)


@dataclass(frozen=True)
class Ladder:
    """Losses of variants at several sizes and seeds, each variant at its own compute."""

    compute: Mapping[str, Array]  # by variant, [sizes], ascending; any unit
    losses: Mapping[str, Array]  # by variant, [sizes, seeds], nats; seeds are paired

    @property
    def sizes(self) -> int:
        """The number of sizes."""
        return len(next(iter(self.compute.values())))

    @property
    def seeds(self) -> int:
        """The number of seeds at each size."""
        return next(iter(self.losses.values())).shape[1]

    @property
    def cells(self) -> int:
        """The number of mean losses."""
        return len(self.compute) * self.sizes

    @property
    def pure_squares(self) -> float:
        """The sum of squares of losses around the mean of their variant and size."""
        return sum(
            float(((losses - losses.mean(axis=1, keepdims=True)) ** 2).sum())
            for losses in self.losses.values()
        )

    def part(self, sizes: int) -> "Ladder":
        """Return the ladder of the first `sizes` sizes."""
        return Ladder(
            {name: c[:sizes] for name, c in self.compute.items()},
            {name: losses[:sizes] for name, losses in self.losses.items()},
        )


@dataclass(frozen=True)
class Law:
    """L = floor + factor * (C / unit)^-exponent, with a factor and exponent per variant."""

    floor: float  # nats
    unit: float  # of compute
    factors: Mapping[str, float]  # nats: a variant's loss above the floor at C = unit
    exponents: Mapping[str, float]
    squares: float  # sum of squared residuals
    parameters: int

    def loss(self, variant: str, compute: float) -> float:
        """Return the loss that the law gives a variant with this compute."""
        above = self.factors[variant] * (compute / self.unit) ** -self.exponents[variant]
        return self.floor + above


@dataclass(frozen=True)
class Multiplier:
    """The compute that a variant needs, over the baseline's, for the same loss."""

    value: float
    interval: Interval | None  # 95% over all variants together; None for one seed


def fit_law(ladder: Ladder, *, own: bool = False) -> Law:
    """Fit the law by least squares of mean losses in nats, with `own` or one shared exponent.

    Given the exponents, the best floor and factors, none below 0, are found exactly; so only the
    exponents are searched: a shared one on a grid and then closely, and own ones from there.
    """
    from scipy.optimize import least_squares, minimize_scalar, nnls

    names, count = list(ladder.compute), len(ladder.compute)
    # In the middle of all compute, factors are numbers of the size of losses.
    unit = float(np.exp(np.log(np.concatenate(list(ladder.compute.values()))).mean()))
    logs = np.stack([np.log(ladder.compute[name] / unit) for name in names])
    means = np.concatenate([ladder.losses[name].mean(axis=1) for name in names])
    of_variant = np.repeat(np.eye(count), ladder.sizes, axis=0)

    def solve(log_exponents: Array) -> tuple[Array, Array]:
        powers = np.exp(-np.exp(log_exponents)[:, None] * logs).reshape(-1, 1)
        columns = np.column_stack([np.ones(len(means)), of_variant * powers])
        weights, _ = nnls(columns, means)
        return weights, columns @ weights - means

    def misfit(log_exponent: float) -> float:
        return float(np.linalg.norm(solve(np.full(count, log_exponent))[1]))

    least, most = map(math.log, EXPONENTS)
    grid = np.linspace(least, most, GRID)
    best = int(np.argmin([misfit(x) for x in grid]))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    found = np.full(count, minimize_scalar(misfit, bounds=bounds, method="bounded").x)
    if own:
        found = least_squares(lambda x: solve(x)[1], found, bounds=(least, most)).x
    weights, missed = solve(found)
    return Law(
        floor=float(weights[0]),
        unit=unit,
        factors=dict(zip(names, map(float, weights[1:]), strict=True)),
        exponents=dict(zip(names, map(float, np.exp(found)), strict=True)),
        squares=float(missed @ missed) * ladder.seeds + ladder.pure_squares,
        parameters=1 + count + (count if own else 1),
    )


def exponents_differ(shared: Law, own: Law, ladder: Ladder) -> float:
    """Return the p of the F test that one exponent serves all variants."""
    extra, parameters = shared.squares - own.squares, own.parameters - shared.parameters
    return _f_test(extra, parameters, own.squares, ladder.cells * ladder.seeds - own.parameters)[0]


def lack_of_fit(law: Law, ladder: Ladder) -> tuple[float, float] | None:
    """Return the p of the F test that the law holds at every size, and the factor that widens.

    The test compares the means' distance from the law with the spread over seeds; None if it is
    impossible. The factor, at least 1, widens intervals for what the law misses beyond the spread.
    It is the Birge ratio, the root of F. Source: Workman et al. 2022, Prog. Theor. Exp. Phys.
    083C01, introduction, sec. 5.2.
    """
    if ladder.seeds < 2 or ladder.cells <= law.parameters:
        return None
    pure, parameters = ladder.pure_squares, ladder.cells - law.parameters
    p, ratio = _f_test(law.squares - pure, parameters, pure, ladder.cells * (ladder.seeds - 1))
    return p, max(1.0, math.sqrt(ratio))


def _f_test(extra: float, parameters: int, squares: float, free: int) -> tuple[float, float]:
    """Return p and F; without squares that could be chance, F counts as 0."""
    from scipy.special import fdtrc

    if squares <= 0:
        return (0.0 if extra > 0 else 1.0), 0.0
    ratio = max(0.0, extra) / parameters / (squares / free)
    return float(fdtrc(parameters, free, ratio)), ratio


def choose_law(ladder: Ladder) -> Law:
    """Return the law with a shared exponent, or one per variant if they differ."""
    shared = fit_law(ladder)
    if len(ladder.compute) < 2 or ladder.cells <= 2 * len(ladder.compute) + 1:
        return shared
    own = fit_law(ladder, own=True)
    return own if exponents_differ(shared, own, ladder) < ALPHA else shared


def multipliers(ladder: Ladder, baseline: str, loss: float) -> dict[str, Multiplier]:
    """Return each other variant's compute over the baseline's for the same loss.

    With one exponent for all it is the same at every loss. The interval is Student's, of
    logarithms, with a confidence of 95% over all variants together (Bonferroni). To first order the
    fit is a weighted sum of the losses (`_weights_of_losses`), so each size adds the variance of
    its own sum over seeds, which keeps variants paired. The degrees of freedom are Satterthwaite's
    (1946, Biometrics Bulletin 2, 110-114), as few sizes may carry most of the variance. The
    interval is wider by the factor of `lack_of_fit`.
    """
    from scipy.special import stdtrit

    law = choose_law(ladder)
    _, widened = lack_of_fit(law, ladder) or (1.0, 1.0)
    others = [name for name in ladder.compute if name != baseline]
    losses = np.stack([ladder.losses[name] for name in ladder.compute])
    made = {}
    for name in others:
        ratio = _log_ratio(law, baseline, name, loss)
        if math.isnan(ratio) or ladder.seeds < 2:
            made[name] = Multiplier(math.exp(ratio), None)
            continue
        weights = _weights_of_losses(law, ladder, baseline, name, loss)
        sums = np.einsum("vs,vsn->sn", weights, losses)
        variances = sums.var(axis=1, ddof=1) / ladder.seeds
        half = 0.0
        if variances.sum() > 0:
            degrees = (ladder.seeds - 1) * variances.sum() ** 2 / (variances**2).sum()
            critical = float(-stdtrit(degrees, ALPHA / len(others) / 2))
            half = critical * math.sqrt(variances.sum()) * widened
        if half > 10 * MAX_LOG:  # the losses do not fall
            made[name] = Multiplier(math.nan, None)
            continue
        made[name] = Multiplier(math.exp(ratio), (math.exp(ratio - half), math.exp(ratio + half)))
    return made


def _weights_of_losses(law: Law, ladder: Ladder, baseline: str, name: str, loss: float) -> Array:
    """Return the derivative of `_log_ratio` by the mean losses, [variants, sizes].

    It is the gradient by the law's parameters (floor, logarithms of factors, then of exponents)
    times the pseudo-inverse of the derivative of what the law predicts by them (Gauss-Newton).
    """
    names = list(ladder.compute)
    count, own = len(names), len(set(law.exponents.values())) > 1
    predicted = np.zeros((count, ladder.sizes, 1 + count + (count if own else 1)))
    gradient = np.zeros(predicted.shape[2])
    for i, variant in enumerate(names):
        scaled, exponent = ladder.compute[variant] / law.unit, law.exponents[variant]
        above = law.factors[variant] * scaled**-exponent
        of_exponent = 1 + count + (i if own else 0)
        predicted[i, :, 0] = law.floor > 0  # a floor of 0 is at its bound and stays there
        predicted[i, :, 1 + i] = above
        predicted[i, :, of_exponent] = -above * exponent * np.log(scaled)
        if variant in (name, baseline):
            sign = 1 if variant == name else -1
            gradient[0] += sign / exponent / (loss - law.floor)
            gradient[1 + i] += sign / exponent
            gradient[of_exponent] -= sign * _log_compute(law, variant, loss)
    inverse = np.linalg.pinv(predicted.reshape(count * ladder.sizes, -1))
    return (gradient @ inverse).reshape(count, ladder.sizes)


def _log_ratio(law: Law, baseline: str, name: str, loss: float) -> float:
    """Return the logarithm of a variant's compute over the baseline's; NaN without an answer."""
    if min(law.factors[name], law.factors[baseline]) <= 0 or loss <= law.floor:
        return math.nan  # its losses do not fall
    ratio = _log_compute(law, name, loss) - _log_compute(law, baseline, loss)
    return ratio if abs(ratio) < MAX_LOG else math.nan


def _log_compute(law: Law, name: str, loss: float) -> float:
    """Return the logarithm of the compute, in units of the law, that a variant needs for a loss."""
    return math.log(law.factors[name] / (loss - law.floor)) / law.exponents[name]


@dataclass(frozen=True)
class Scaled:
    """What the losses over all sizes say about one cost."""

    cost: str  # a key of LADDER_COSTS
    ladder: Ladder
    law: Law
    misfit: float | None  # p that the law holds at every size; None: cannot be tested
    widened: float  # the factor by which it widened the intervals
    loss: float  # where the multipliers are given: the highest of the largest size's means, nats
    multipliers: Mapping[str, Multiplier]
    predicted: Mapping[str, float]  # the largest size's losses, from the law of the smaller ones
    measured: Mapping[str, float]
    beyond: Mapping[str, float] | None  # losses at BEYOND times the largest; None: the law fails
    left_out: Sequence[str]  # variants that need more than MAX_TIMES as much

    @property
    def shared(self) -> bool:
        """Whether all variants share an exponent, so that a multiplier holds for every loss."""
        return len(set(self.law.exponents.values())) == 1


@dataclass(frozen=True)
class LadderReport:
    """A ladder's sizes, smallest first, and what they say about each cost."""

    where: str  # what distinguishes it from other ladders; "" for the only one
    baseline: str
    sizes: Sequence[str]
    seeds: int
    costs: Sequence[Scaled]


def _tokens(run: Run) -> float:
    return run.steps * int(run.settings["batch_size"]) * int(run.settings["model.context_length"])


# What a run has spent of each cost; a KeyError if it lacks the figure.
LADDER_COSTS: dict[str, Callable[[Run], float]] = {
    "compute": lambda run: run.metrics[FLOPS] * _tokens(run),
    "cache": lambda run: run.metrics[CACHE],
    "seconds": lambda run: _tokens(run) / run.metrics[SPEED],
}


def report_ladder(
    where: str, baseline: str, sizes: Sequence[tuple[str, Groups]]
) -> LadderReport | None:
    """Return what the named sizes, smallest first, say about each cost.

    `baseline` is a row of each. None unless they are MIN_SIZES or more with growing compute, and
    share another row and seeds.
    """
    if len(sizes) < MIN_SIZES:
        return None
    first, *others = (groups for _, groups in sizes)
    names = [name for name in first if all(name in groups for groups in others)]
    rows = {name: [groups[name] for _, groups in sizes] for name in names}
    seeds = set.intersection(*({r.seed for r in runs} for own in rows.values() for runs in own))
    if len(names) < 2 or not seeds:
        return None
    cells = {
        name: [[run for run in runs if run.seed in seeds] for runs in own]
        for name, own in rows.items()
    }
    compute, *others = LADDER_COSTS
    scaled = _scaled(compute, cells, baseline)
    if scaled is None:
        return None
    cells = {name: cells[name] for name in scaled.measured}
    costs = [scaled, *(_scaled(cost, cells, baseline) for cost in others)]
    known = [scaled for scaled in costs if scaled is not None]
    return LadderReport(where, baseline, [size for size, _ in sizes], len(seeds), known)


def _scaled(
    cost: str,
    cells: Mapping[str, list[list[Run]]],
    baseline: str,
    left_out: Sequence[str] = (),
) -> Scaled | None:
    """Return what the runs of each variant and size say about the cost.

    Variants that have not learned are left out. None if the cost does not grow or losses do not
    fall with it: then there is no law.
    """
    of = LADDER_COSTS[cost]
    try:
        spent = {
            name: np.array([mean(of(run) for run in runs) for runs in sizes])
            for name, sizes in cells.items()
        }
    except (KeyError, ValueError, ZeroDivisionError):  # a run lacks the figure
        return None
    if any(np.any(np.diff(own) <= 0) or own[0] <= 0 for own in spent.values()):
        return None
    losses = {
        name: np.array([[run.metrics[LOSS] for run in runs] for runs in sizes])
        for name, sizes in cells.items()
    }
    ladder = Ladder(spent, losses)
    law, smaller = choose_law(ladder), choose_law(ladder.part(ladder.sizes - 1))
    misfit, widened = lack_of_fit(law, ladder) or (None, 1.0)
    largest = {name: float(own[-1]) for name, own in spent.items()}
    measured = {name: float(own[-1].mean()) for name, own in losses.items()}
    reached = max(measured.values())
    times = multipliers(ladder, baseline, reached)
    if lost := [name for name, one in times.items() if not math.isfinite(one.value)]:
        rest = {name: own for name, own in cells.items() if name not in lost}
        # Fitted again: they bent the law of all.
        return _scaled(cost, rest, baseline, [*left_out, *lost]) if len(rest) > 1 else None
    holds = misfit is not None and misfit >= ALPHA
    return Scaled(
        cost=cost,
        ladder=ladder,
        law=law,
        misfit=misfit,
        widened=widened,
        loss=reached,
        multipliers=times,
        predicted={name: smaller.loss(name, compute) for name, compute in largest.items()},
        measured=measured,
        beyond={name: law.loss(name, BEYOND * compute) for name, compute in largest.items()}
        if holds
        else None,
        left_out=left_out,
    )
