"""Simulates reports and counts how often they are wrong, decided by the report's own code.

It prints the tables of docs/comparing.md: the shares of false claims on variants of equal mean
loss, and the smallest difference that a number of seeds can show. With tracks=2000 it prints the
table of docs/track_rules.md instead: what the attention track says of entries with a known true
effect, from the choice of their rates to the gate.
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
from gptattn.compare.effective_compute import Effective, fit_curve, judge, share_spread
from gptattn.compare.finished_runs import Run
from gptattn.compare.table import Table
from gptattn.runs.metrics import LOSS
from gptattn.sweep.tuning import find_vertex, next_rate

Losses = NDArray[np.float64]
SEEDS = (3, 5, 8, 12)
DEVIATION = 0.02  # nats; the noise is multiplied by it


def smallest_difference(deviation: float, n: int, comparisons: int = 1) -> float:
    """Return the true difference that n >= 2 seeds show with 80% power.

    `deviation` is the standard deviation of the paired differences.
    """
    highest = 3 * (statistics.critical_t(n, comparisons) + 3) / np.sqrt(n)
    found = root_scalar(
        lambda x: statistics.power(x, n, comparisons) - statistics.POWER, bracket=(0.0, highest)
    )
    return deviation * found.root


def unlike(generator: Generator, size: tuple[int, ...]) -> Losses:
    """Return normal noise; the first variant, the baseline, has 3 times the standard deviation."""
    noise = generator.normal(size=size)
    noise[0] *= 3
    return noise


def skewed_baseline(generator: Generator, size: tuple[int, ...]) -> Losses:
    """Return noise in which only the first variant is skewed.

    Differences to it are skewed, too, which violates the assumptions of the t test.
    """
    noise = generator.normal(size=size)
    noise[0] = generator.exponential(size=size[1:]) - 1
    return noise


def diverging_baseline(generator: Generator, size: tuple[int, ...]) -> Losses:
    """Return noise in which one run in ten of the first variant is 5 standard deviations higher."""
    noise = generator.normal(size=size)
    noise[0] += 5 * (generator.uniform(size=size[1:]) < 0.1) - 0.5
    return noise


# Each makes noise [variants, seeds] with the same mean for all variants.
NOISE: dict[str, Callable[[Generator, tuple[int, ...]], Losses]] = {
    "normal": lambda g, size: g.normal(size=size),
    "normal, correlation 0.5 at a seed": lambda g, size: (
        g.normal(size=size) + g.normal(size=size[1:])
    ),
    "skewed (exponential)": lambda g, size: g.exponential(size=size),
    "heavy-tailed (t, 3 degrees)": lambda g, size: g.standard_t(3, size=size),
    "baseline of three times the spread": unlike,
    "baseline alone skewed": skewed_baseline,
    "baseline alone diverges, one run in ten": diverging_baseline,
    "each diverges, one run in ten": lambda g, size: (
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


def false_claims(noise: str, variants: int, n: int, fields: int) -> tuple[float, float]:
    """Return the shares of reports with a false claim: about the baseline, about the best row."""
    generator = np.random.default_rng([variants, n])
    rows = firsts = 0
    for _ in range(fields):
        found = section(DEVIATION * NOISE[noise](generator, (variants, n)))
        rows += any(row.difference and row.difference.shown for row in found.rows)
        firsts += len(found.alike) < variants - 1
    return rows / fields, firsts / fields


# The attention track: a baseline whose loss falls as it does in docs/track_rules.md, and entries.
SEEDS_BY_BUDGET = {0.5: 5, 0.7075: 5, 1.0: 20, 2.0: 5, 4.0: 5}  # of the baseline
SEEDS_AT_GATE = {0.5: 5, 1.0: 5, 1.414: 5, 2.0: 5}
ENTRIES = 55
TRACK_DEVIATION = 0.02  # bits per byte, at the whole budget
EFFECTS = (1.0, 1.02, 1.05, 1.10, 1.60)  # true effective compute; its inverse for every other entry
RECORD = 0.01  # p, at both sizes
FEW = 100  # of fewer entries at the gate, no share is given
# Rates, in octaves from the middle one of three that are tried. Each entry's best lies within one.
TRIED = (0.5, 1.0, 2.0)
TRIAL_DEVIATION = 0.02  # bits per byte, at half of the budget
BEND, TRIAL_BEND = 0.09, 0.10  # bits per byte for a rate that is an octave off
# Octaves: the standard deviation, over entries, of how far a run's best rate lies from the one that
# its trials chose, times the regime's `scale`.
DRIFT = 0.09


def baseline_loss(compute: float) -> float:
    """Return about the baseline's losses: 2.69, 2.23, 1.96 and 1.75 bits per byte."""
    return 2.115 * (compute - 0.3075) ** -0.1466


def lose_by_rate(generator: Generator) -> float:
    """Return what the rate that an entry's trials choose costs it beside its best one."""
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
    """What became of all entries of one true effect."""

    entries: int = 0
    right: int = 0  # a claim with the right sign
    wrong: int = 0  # a claim with the wrong sign, or any where the effect is none
    equivalent: int = 0
    second: int = 0  # open after the first seeds
    still_open: int = 0
    held: int = 0  # by the interval
    at_gate: int = 0
    held_at_gate: int = 0
    records: int = 0
    tables_wrong: int = 0  # tables with a wrong claim; a wrong record is one, too


def simulate_track(effect: float, tables: int) -> Claims:
    """Return what the track says of entries with this effective compute, at both sizes."""
    generator = np.random.default_rng(round(1000 * effect))
    truths = [effect if i % 2 else 1 / effect for i in range(ENTRIES)]
    done = Claims()

    def draw(compute: float, lost: float, seeds: int) -> Losses:
        return baseline_loss(compute) + lost + TRACK_DEVIATION * generator.normal(size=seeds)

    def draw_baseline(seeds: dict[float, int]) -> dict[float, Losses]:
        return {c: draw(c, lose_by_rate(generator), n) for c, n in seeds.items()}

    for _ in range(tables):
        base = draw_baseline(SEEDS_BY_BUDGET)
        lost = [lose_by_rate(generator) for _ in truths]
        losses = [draw(truth, own, 3) for truth, own in zip(truths, lost, strict=True)]
        found, p, verdicts = _look(base, losses)
        later = [i for i, verdict in enumerate(verdicts) if verdict == "open"]
        for i in later:
            losses[i] = np.append(losses[i], draw(truths[i], lost[i], 5))
        if later:
            found, p, verdicts = _look(base, losses)
        best = [i for i, one in enumerate(found) if p[i] < RECORD and one.value > 1]
        if best:
            at_gate = [draw(truths[i], lose_by_rate(generator), 8) for i in best]
            ratios, p, _ = _look(draw_baseline(SEEDS_AT_GATE), at_gate)
            for i, one, own in zip(best, ratios, p, strict=True):
                done.at_gate += 1
                done.held_at_gate += one.interval[0] <= truths[i] <= one.interval[1]
                done.records += own < RECORD and one.value > 1
        done.second += len(later)
        wrong = 0
        for truth, verdict, one in zip(truths, verdicts, found, strict=True):
            claim = {"b": 1, "w": -1}.get(verdict[0], 0)
            sign = int(np.sign(truth - 1))
            done.entries += 1
            done.right += claim != 0 and claim == sign
            done.wrong += claim not in (0, sign)
            wrong += claim not in (0, sign)
            done.equivalent += verdict == "equivalent"
            done.still_open += verdict == "open"
            done.held += one.interval[0] <= truth <= one.interval[1]
        done.tables_wrong += wrong > 0
    return done


def _look(
    base: dict[float, Losses], losses: list[Losses]
) -> tuple[list[Effective], list[float], list[str]]:
    """Return the effective compute, the corrected p and the verdicts."""
    budgets = {compute: own.tolist() for compute, own in base.items()}
    entries = [own.tolist() for own in losses]
    (shared, _), *spreads = share_spread([budgets[1.0], *entries])
    return judge(entries, [1.0] * len(entries), fit_curve(budgets, {1.0: shared}), spreads)


def print_tracks(tables: int) -> None:
    """Print the table of docs/track_rules.md."""
    cells = [
        [
            *("true effect", "right", "wrong", "tables with a wrong claim", "equivalent"),
            *("open", "second stage", "intervals that hold it", "at the gate", "records, of all"),
        ]
    ]
    for effect in EFFECTS:
        done = simulate_track(effect, tables)
        n = done.entries
        shares = [done.right / n, done.wrong / n, done.tables_wrong / tables]
        shares += [done.equivalent / n, done.still_open / n, done.second / n, done.held / n]
        held = f"{done.held_at_gate / done.at_gate:.3f}" if done.at_gate >= FEW else ""
        shown = (f"{share:.3f}" for share in shares)
        cells.append([f"{effect - 1:.0%}", *shown, held, f"{done.records / n:.3f}"])
    print(Table("", cells).to_markdown())


@dataclass(frozen=True)
class Arguments:
    """fields=1000"""

    fields: Count = option("reports per cell", 1_000)
    tracks: Count | None = option("print the table of so many attention tracks")


def run(arguments: Sequence[str]) -> None:
    """Print the tables that were asked for."""
    args = parse(Arguments, arguments)
    if args.tracks is not None:
        print_tracks(args.tracks)
        return
    fields = args.fields
    statistics.seeds_needed = lambda *_: None  # slow, and not needed for the decisions
    cells = [["losses, equal in the mean", "variants", *(f"n = {n}" for n in SEEDS)]]
    for noise in NOISE:
        for variants in (4, 8):
            shares = [false_claims(noise, variants, n, fields) for n in SEEDS]
            shown = [f"{rows:.1%}, {firsts:.1%}" for rows, firsts in shares]
            cells.append([noise, str(variants), *shown])
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
