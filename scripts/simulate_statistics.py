"""Simulates reports, and counts how often the report's own code decides wrongly.

Prints the tables of docs/comparing.md: the shares of false claims about variants with equal mean
loss, and the smallest difference that a number of seeds can show. With tracks=2000 it prints the
table of docs/track_rules.md instead: the track's verdicts on entries whose true effect is known,
from the choice of learning rates to the gate.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.optimize import root_scalar

from gptattn.cli.arguments import Count, option, parse, run_script
from gptattn.compare import statistics
from gptattn.compare.comparison import Section, make_section
from gptattn.compare.effective_compute import EffectiveCompute, fit_curve, judge, share_spread
from gptattn.compare.finished_runs import Run
from gptattn.compare.table import Table
from gptattn.runs.metrics import LOSS
from gptattn.sweep.tuning import find_vertex, next_rate

Losses = NDArray[np.float64]
SEEDS = (3, 5, 8, 12)
DEVIATION = 0.02  # nats; scales the noise


def smallest_difference(deviation: float, n: int, comparisons: int = 1) -> float:
    """Return the true difference that n >= 2 seeds show with 80% power.

    `deviation` is the standard deviation of the paired differences.
    """
    highest = 3 * (statistics.critical_t(n, comparisons) + 3) / np.sqrt(n)
    root = root_scalar(
        lambda x: statistics.power(x, n, comparisons) - statistics.POWER, bracket=(0.0, highest)
    )
    return deviation * root.root


def wide_baseline(generator: Generator, size: tuple[int, ...]) -> Losses:
    """Return normal noise; the first variant, the baseline, has 3 times the standard deviation."""
    noise = generator.normal(size=size)
    noise[0] *= 3
    return noise


def skewed_baseline(generator: Generator, size: tuple[int, ...]) -> Losses:
    """Return noise in which only the first variant is skewed.

    So differences to it are skewed too, which violates the t test's assumptions.
    """
    noise = generator.normal(size=size)
    noise[0] = generator.exponential(size=size[1:]) - 1
    return noise


def diverging_baseline(generator: Generator, size: tuple[int, ...]) -> Losses:
    """Return noise in which one run in ten of the first variant is 5 standard deviations higher."""
    noise = generator.normal(size=size)
    noise[0] += 5 * (generator.uniform(size=size[1:]) < 0.1) - 0.5
    return noise


# Each returns noise [variants, seeds] with the same mean for all variants.
NOISE: dict[str, Callable[[Generator, tuple[int, ...]], Losses]] = {
    "normal": lambda g, size: g.normal(size=size),
    "normal, correlation 0.5 within a seed": lambda g, size: (
        g.normal(size=size) + g.normal(size=size[1:])
    ),
    "skewed (exponential)": lambda g, size: g.exponential(size=size),
    "heavy-tailed (t, 3 degrees)": lambda g, size: g.standard_t(3, size=size),
    "baseline with three times the spread": wide_baseline,
    "only the baseline skewed": skewed_baseline,
    "only the baseline diverges, one run in ten": diverging_baseline,
    "every variant diverges, one run in ten": lambda g, size: (
        g.normal(size=size) + 5 * (g.uniform(size=size) < 0.1)
    ),
}


def section(losses: Losses) -> Section:
    """Return the report's section on losses [variants, seeds]; the first row is the baseline."""
    names = ["mha", *(f"v{i}" for i in range(1, len(losses)))]
    groups = {
        name: [
            Run(Path(f"{name}_{seed}"), name, seed, {LOSS: float(loss)}, {})
            for seed, loss in enumerate(row)
        ]
        for name, row in zip(names, losses, strict=True)
    }
    return make_section(groups, "mha")


def false_claims(noise: str, variants: int, n: int, reports: int) -> tuple[float, float]:
    """Return the shares of reports with false claims: against the baseline, about the best row."""
    generator = np.random.default_rng([variants, n])
    rows = firsts = 0
    for _ in range(reports):
        report = section(DEVIATION * NOISE[noise](generator, (variants, n)))
        rows += any(row.difference and row.difference.is_significant for row in report.rows)
        firsts += len(report.ties) < variants - 1
    return rows / reports, firsts / reports


# The attention track: entries, and a baseline whose loss falls as in docs/track_rules.md.
SEEDS_BY_BUDGET = {0.5: 5, 0.7075: 5, 1.0: 20, 2.0: 5, 4.0: 5}  # the baseline's
SEEDS_AT_GATE = {0.5: 5, 1.0: 5, 1.414: 5, 2.0: 5}
ENTRIES = len([*Path(__file__).parents[1].glob("benchmarks/track/*.json")])  # with the placebo
TRACK_DEVIATION = 0.02  # bits per byte, at the full budget
EFFECTS = (1.0, 1.02, 1.05, 1.10, 1.60)  # true effective compute; every other entry has the inverse
RECORD = 0.01  # highest p, at both sizes
FEW = 100  # with fewer entries at the gate, no share is printed
# Rates tried, as multiples of the middle one. Each entry's best is within an octave of it.
TRIED = (0.5, 1.0, 2.0)
TRIAL_DEVIATION = 0.02  # bits per byte, at half the budget
BEND, TRIAL_BEND = 0.09, 0.10  # bits per byte lost by a rate an octave off
# In octaves: the standard deviation, over entries, of the distance between a run's best rate and
# the one its trials chose.
DRIFT = 0.09


def baseline_loss(compute: float) -> float:
    """Return roughly the baseline's loss: 2.69, 2.23, 1.96 and 1.75 bits per byte."""
    return 2.115 * (compute - 0.3075) ** -0.1466


def lose_by_rate(generator: Generator) -> float:
    """Return the loss that an entry's trials add by not choosing its best rate."""
    best = generator.uniform(-1, 1)

    def try_rate(rate: float) -> float:
        noise = TRIAL_DEVIATION * generator.normal()
        return TRIAL_BEND * (np.log2(rate) - best) ** 2 + noise

    losses = {rate: try_rate(rate) for rate in TRIED}
    while (further := next_rate(losses)) is not None:
        losses[further] = try_rate(further)
    chosen = find_vertex(losses)
    return BEND * (np.log2(chosen) - best - DRIFT * generator.normal()) ** 2


@dataclass
class Claims:
    """Counts of what became of all entries with one true effect."""

    entries: int = 0
    right: int = 0  # a claim with the right sign
    wrong: int = 0  # a claim with the wrong sign, or any claim without an effect
    equivalent: int = 0
    second_stage: int = 0  # open after the first seeds
    still_open: int = 0
    covered: int = 0  # the interval holds the true effect
    at_gate: int = 0
    covered_at_gate: int = 0
    records: int = 0
    tables_wrong: int = 0  # tables with a wrong claim, including a wrong record


def simulate_track(effect: float, tables: int) -> Claims:
    """Return the track's claims about entries with this effective compute, at both sizes."""
    generator = np.random.default_rng(round(1000 * effect))
    truths = [effect if i % 2 else 1 / effect for i in range(ENTRIES)]
    claims = Claims()

    def draw(compute: float, lost: float, seeds: int) -> Losses:
        return baseline_loss(compute) + lost + TRACK_DEVIATION * generator.normal(size=seeds)

    def draw_baseline(seeds: dict[float, int]) -> dict[float, Losses]:
        return {c: draw(c, lose_by_rate(generator), n) for c, n in seeds.items()}

    for _ in range(tables):
        base = draw_baseline(SEEDS_BY_BUDGET)
        lost = [lose_by_rate(generator) for _ in truths]
        losses = [draw(truth, loss, 3) for truth, loss in zip(truths, lost, strict=True)]
        effects, p, verdicts = _judge(base, losses)
        still_open = [i for i, verdict in enumerate(verdicts) if verdict == "open"]
        for i in still_open:
            losses[i] = np.append(losses[i], draw(truths[i], lost[i], 5))
        if still_open:
            effects, p, verdicts = _judge(base, losses)
        best = [i for i, one in enumerate(effects) if p[i] < RECORD and one.value > 1]
        if best:
            at_gate = [draw(truths[i], lose_by_rate(generator), 8) for i in best]
            ratios, p, _ = _judge(draw_baseline(SEEDS_AT_GATE), at_gate)
            for i, one, p_at_gate in zip(best, ratios, p, strict=True):
                claims.at_gate += 1
                claims.covered_at_gate += one.interval[0] <= truths[i] <= one.interval[1]
                claims.records += p_at_gate < RECORD and one.value > 1
        claims.second_stage += len(still_open)
        wrong = 0
        for truth, verdict, one in zip(truths, verdicts, effects, strict=True):
            claim = {"b": 1, "w": -1}.get(verdict[0], 0)
            sign = int(np.sign(truth - 1))
            claims.entries += 1
            claims.right += claim != 0 and claim == sign
            claims.wrong += claim not in (0, sign)
            wrong += claim not in (0, sign)
            claims.equivalent += verdict == "equivalent"
            claims.still_open += verdict == "open"
            claims.covered += one.interval[0] <= truth <= one.interval[1]
        claims.tables_wrong += wrong > 0
    return claims


def _judge(
    base: dict[float, Losses], losses: list[Losses]
) -> tuple[list[EffectiveCompute], list[float], list[str]]:
    """Return each entry's effective compute, corrected p and verdict."""
    budgets = {compute: drawn.tolist() for compute, drawn in base.items()}
    entries = [drawn.tolist() for drawn in losses]
    (shared, _), *spreads = share_spread([budgets[1.0], *entries])
    return judge(entries, [1.0] * len(entries), fit_curve(budgets, {1.0: shared}), spreads)


def print_tracks(tables: int) -> None:
    """Print the attention track's table."""
    cells = [
        [
            *("true effect", "right", "wrong", "tables with a wrong claim", "equivalent"),
            *("open", "second stage", "intervals that hold it", "at the gate", "records, of all"),
        ]
    ]
    for effect in EFFECTS:
        claims = simulate_track(effect, tables)
        n = claims.entries
        counts = claims.equivalent, claims.still_open, claims.second_stage, claims.covered
        shares = [claims.right / n, claims.wrong / n, claims.tables_wrong / tables]
        figures = [f"{share:.3f}" for share in (*shares, *(count / n for count in counts))]
        at_gate = claims.covered_at_gate / claims.at_gate if claims.at_gate >= FEW else None
        figures += ["" if at_gate is None else f"{at_gate:.3f}", f"{claims.records / n:.3f}"]
        cells.append([f"{effect - 1:.0%}", *figures])
    print(Table("", cells).to_markdown())


@dataclass(frozen=True)
class Arguments:
    """reports=1000"""

    reports: Count = option("reports per cell", 1_000)
    tracks: Count | None = option("simulate this many attention tracks instead")


def run(arguments: Sequence[str]) -> None:
    """Print the requested tables."""
    args = parse(Arguments, arguments)
    if args.tracks is not None:
        print_tracks(args.tracks)
        return
    reports = args.reports
    statistics.seeds_needed = lambda *_: None  # slow, and no decision needs it
    cells = [["losses with equal means", "variants", *(f"n = {n}" for n in SEEDS)]]
    for noise in NOISE:
        for variants in (4, 8):
            shares = [false_claims(noise, variants, n, reports) for n in SEEDS]
            figures = [f"{rows:.1%}, {firsts:.1%}" for rows, firsts in shares]
            cells.append([noise, str(variants), *figures])
    print(Table("", cells).to_markdown())
    heading = ["variants", *(f"n = {n}" for n in (2, 3, 4, 5, 6, 8, 10, 12))]
    cells = [heading]
    for variants in (2, 3, 4, 8):
        smallest = [
            smallest_difference(np.sqrt(2) * DEVIATION, int(name[4:]), variants - 1)
            for name in heading[1:]
        ]
        cells.append([str(variants), *(f"{value:.2g}" for value in smallest)])
    print(f"\n{Table('', cells).to_markdown()}")


if __name__ == "__main__":
    sys.exit(run_script(run, Arguments))
