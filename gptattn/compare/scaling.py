"""Scaling laws: how loss falls with compute, and what a variant needs for the same loss.

The law is L = E + A * C^-alpha (Hoffmann et al. 2022, arXiv:2203.15556, sec. 3.3, here of compute
alone): E, what no compute takes away, is shared by all variants, A is each variant's own, and alpha
is shared unless the losses say otherwise. Pure functions of arrays; scipy is imported inside them,
as in `statistics.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gptattn.compare.statistics import ALPHA, Interval

Array = NDArray[np.float64]
EXPONENTS = (0.005, 2.0)  # searched
GRID = 24  # exponents tried before the search is refined
RESAMPLES = 400
MOST_LOG = math.log(1e3)  # a variant that needs more than a thousand times as much has not learned


@dataclass(frozen=True)
class Ladder:
    """Losses of variants at several sizes and seeds, each variant at its own compute."""

    compute: Mapping[str, Array]  # by variant, [sizes], ascending; any unit
    losses: Mapping[str, Array]  # by variant, [sizes, seeds], nats; seeds are paired

    def __post_init__(self) -> None:
        shapes = {losses.shape for losses in self.losses.values()}
        if len(shapes) != 1 or self.compute.keys() != self.losses.keys():
            raise ValueError(f"variants have losses of shapes {sorted(shapes)}; all must be alike")
        ((sizes, _),) = shapes
        if any(len(c) != sizes or np.any(np.diff(c) <= 0) for c in self.compute.values()):
            raise ValueError(f"compute must have {sizes} values that grow, for each variant")

    @property
    def sizes(self) -> int:
        """The number of sizes."""
        return len(next(iter(self.compute.values())))

    @property
    def seeds(self) -> int:
        """The number of seeds at each size."""
        return next(iter(self.losses.values())).shape[1]

    def part(self, sizes: int) -> "Ladder":
        """Return the ladder of the first `sizes` sizes."""
        return Ladder(
            {name: c[:sizes] for name, c in self.compute.items()},
            {name: losses[:sizes] for name, losses in self.losses.items()},
        )


@dataclass(frozen=True)
class Law:
    """L = floor + factor * (C / unit)^-exponent, with factor and exponent of each variant."""

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

    def compute(self, variant: str, loss: float) -> float:
        """Return the compute that a variant needs for this loss; infinite at or below the floor."""
        if loss <= self.floor:
            return math.inf
        share = self.factors[variant] / (loss - self.floor)
        return self.unit * share ** (1 / self.exponents[variant])


@dataclass(frozen=True)
class Multiplier:
    """The compute that a variant needs, over the baseline's, for the same loss."""

    value: float
    interval: Interval | None  # 95% over all variants together; None for one seed


def fit_shared(ladder: Ladder) -> Law:
    """Fit the law with one exponent for all variants, by least squares of losses in nats."""
    from scipy.optimize import minimize_scalar, nnls

    names = list(ladder.compute)
    unit = _unit(ladder)
    logs = np.concatenate([np.log(ladder.compute[name] / unit) for name in names])
    means = np.concatenate([ladder.losses[name].mean(axis=1) for name in names])
    own = np.repeat(np.eye(len(names)), ladder.sizes, axis=0)

    def solve(exponent: float) -> tuple[Array, float]:
        columns = np.column_stack([np.ones(len(logs)), own * np.exp(-exponent * logs)[:, None]])
        return nnls(columns, means)

    def misfit(log_exponent: float) -> float:
        return solve(math.exp(log_exponent))[1]

    grid = np.linspace(math.log(EXPONENTS[0]), math.log(EXPONENTS[1]), GRID)
    best = int(np.argmin([misfit(x) for x in grid]))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    exponent = math.exp(minimize_scalar(misfit, bounds=bounds, method="bounded").x)
    weights, norm = solve(exponent)
    return Law(
        floor=float(weights[0]),
        unit=unit,
        factors=dict(zip(names, map(float, weights[1:]), strict=True)),
        exponents=dict.fromkeys(names, exponent),
        squares=norm**2 * ladder.seeds + _pure_squares(ladder),
        parameters=len(names) + 2,
    )


def fit_own(ladder: Ladder) -> Law:
    """Fit the law with an exponent for each variant, from the shared fit on."""
    from scipy.optimize import least_squares

    start = fit_shared(ladder)
    names, count = list(ladder.compute), len(ladder.compute)
    logs = np.stack([np.log(ladder.compute[name] / start.unit) for name in names])
    means = np.stack([ladder.losses[name].mean(axis=1) for name in names])

    def residuals(x: Array) -> Array:
        exponents, factors = np.exp(x[1 : count + 1, None]), np.exp(x[count + 1 :, None])
        return (x[0] + factors * np.exp(-exponents * logs) - means).ravel()

    tiny = np.finfo(float).tiny
    first = [start.floor, *([math.log(start.exponents[names[0]])] * count)]
    first += [math.log(max(start.factors[name], tiny)) for name in names]
    least, most = map(math.log, EXPONENTS)
    lower = np.array([0.0, *[least] * count, *[-np.inf] * count])
    upper = np.array([np.inf, *[most] * count, *[np.inf] * count])
    found = least_squares(
        residuals, np.clip(first, lower, upper), bounds=(lower, upper), x_scale="jac"
    )
    x = found.x
    return Law(
        floor=float(x[0]),
        unit=start.unit,
        factors=dict(zip(names, map(float, np.exp(x[count + 1 :])), strict=True)),
        exponents=dict(zip(names, map(float, np.exp(x[1 : count + 1])), strict=True)),
        squares=2 * float(found.cost) * ladder.seeds + _pure_squares(ladder),
        parameters=2 * count + 1,
    )


def exponents_differ(shared: Law, own: Law, ladder: Ladder) -> float:
    """Return the p of the F test that one exponent serves all variants."""
    runs = len(ladder.compute) * ladder.sizes * ladder.seeds
    return _f_test(
        shared.squares - own.squares,
        own.parameters - shared.parameters,
        own.squares,
        runs - own.parameters,
    )


def lack_of_fit(law: Law, ladder: Ladder) -> float | None:
    """Return the p of the F test that the law holds at every size; None where it cannot be told.

    What the means miss the law by is held against the spread over seeds.
    """
    cells = len(ladder.compute) * ladder.sizes
    if ladder.seeds < 2 or cells <= law.parameters:
        return None
    pure = _pure_squares(ladder)
    free = cells * (ladder.seeds - 1)
    return _f_test(law.squares - pure, cells - law.parameters, pure, free)


def widening(law: Law, ladder: Ladder) -> float:
    """Return the factor on intervals for what the law misses beyond the spread over seeds, >= 1.

    It is the Birge ratio: the root of what the means miss per degree of freedom over the pure
    spread. Source: Workman et al. 2022, Prog. Theor. Exp. Phys. 083C01, introduction, sec. 5.2.
    """
    if lack_of_fit(law, ladder) is None:
        return 1.0
    cells, pure = len(ladder.compute) * ladder.sizes, _pure_squares(ladder)
    missed = (law.squares - pure) / (cells - law.parameters)
    spread = pure / (cells * (ladder.seeds - 1))
    return max(1.0, math.sqrt(max(0.0, missed) / spread)) if spread > 0 else 1.0


def choose_law(ladder: Ladder) -> Law:
    """Return the law with a shared exponent, or with each variant's own where they differ."""
    shared = fit_shared(ladder)
    cells = len(ladder.compute) * ladder.sizes
    if len(ladder.compute) < 2 or cells <= 2 * len(ladder.compute) + 1:
        return shared
    own = fit_own(ladder)
    return own if exponents_differ(shared, own, ladder) < ALPHA else shared


def multipliers(ladder: Ladder, baseline: str, loss: float, seed: int = 0) -> dict[str, Multiplier]:
    """Return each other variant's compute over the baseline's for the same loss.

    With one exponent for all it is the same at every loss. The interval is Student's, of
    logarithms: its spread is that of fits to seeds drawn again with replacement (Efron and
    Tibshirani 1993, An Introduction to the Bootstrap, ch. 6), the same draw for all variants of a
    size, times `widening`, and its degrees of freedom are the seeds less one over all sizes. The
    confidence is 95% over all variants together (Bonferroni).
    """
    from scipy.special import stdtrit

    law = choose_law(ladder)
    shared = len(set(law.exponents.values())) == 1
    fit: Callable[[Ladder], Law] = fit_shared if shared else fit_own
    others = [name for name in ladder.compute if name != baseline]
    found = _ratios(law, baseline, others, loss)
    if ladder.seeds < 2:
        return {name: Multiplier(found[name], None) for name in others}
    generator = np.random.default_rng(seed)
    draws = [
        _ratios(fit(_resampled(ladder, generator)), baseline, others, loss)
        for _ in range(RESAMPLES)
    ]
    # Seeds drawn from n vary less than seeds do, by this factor.
    wider = math.sqrt(ladder.seeds / (ladder.seeds - 1)) * widening(law, ladder)
    critical = float(-stdtrit(ladder.sizes * (ladder.seeds - 1), ALPHA / len(others) / 2))
    made = {}
    for name in others:
        logs = np.log([draw[name] for draw in draws])
        if not np.isfinite(logs).all():  # of seeds drawn again some have no law
            made[name] = Multiplier(found[name], None)
            continue
        half = critical * wider * float(logs.std(ddof=1))
        middle = math.log(found[name])
        made[name] = Multiplier(found[name], (math.exp(middle - half), math.exp(middle + half)))
    return made


def _ratios(law: Law, baseline: str, others: Sequence[str], loss: float) -> dict[str, float]:
    """Return each variant's compute over the baseline's; NaN where the law gives none."""
    return {name: _ratio(law, baseline, name, loss) for name in others}


def _ratio(law: Law, baseline: str, name: str, loss: float) -> float:
    factor, base = law.factors[name], law.factors[baseline]
    if min(factor, base) <= 0 or loss <= law.floor:
        return math.nan  # losses that do not fall
    exponent, its = law.exponents[name], law.exponents[baseline]
    # Of logarithms: where a variant hardly learns, the compute itself is larger than any float.
    log = math.log(factor / (loss - law.floor)) / exponent
    log -= math.log(base / (loss - law.floor)) / its
    return math.exp(log) if abs(log) < MOST_LOG else math.nan


def _resampled(ladder: Ladder, generator: np.random.Generator) -> Ladder:
    """Draw the seeds of each size again; variants stay paired."""
    drawn = generator.integers(ladder.seeds, size=(ladder.sizes, ladder.seeds))
    return Ladder(
        ladder.compute,
        {name: np.take_along_axis(losses, drawn, 1) for name, losses in ladder.losses.items()},
    )


def _unit(ladder: Ladder) -> float:
    """Return the middle of all compute, so that factors are numbers of the size of losses."""
    return float(np.exp(np.log(np.concatenate(list(ladder.compute.values()))).mean()))


def _pure_squares(ladder: Ladder) -> float:
    """Return the sum of squares of losses around the mean of their variant and size."""
    return sum(
        float(((losses - losses.mean(axis=1, keepdims=True)) ** 2).sum())
        for losses in ladder.losses.values()
    )


def _f_test(extra: float, parameters: int, squares: float, free: int) -> float:
    from scipy.special import fdtrc

    if squares <= 0:
        return 0.0 if extra > 0 else 1.0
    return float(fdtrc(parameters, free, max(0.0, extra) / parameters / (squares / free)))
