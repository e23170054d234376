"""Simulates reports and counts how often they are wrong, decided by the report's own code.

`python scripts/simulate_statistics.py [--fields 1000]` prints the tables of docs/comparing.md: the
shares of false claims on variants of equal mean loss, and the smallest difference that a number of
seeds can show. `--tracks 2000` prints the table of docs/track.md instead: what both stages of the
attention track say of entries whose true effect is known.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from gptattn.compare import statistics
from gptattn.compare.comparison import Section, make_section
from gptattn.compare.finished_runs import Run
from gptattn.compare.table import markdown_table
from gptattn.compare.track_statistics import (
    Curve,
    Effective,
    correct_holm,
    decide,
    effective_compute,
    fit_curve,
    share_spread,
)

Losses = NDArray[np.float64]
SEEDS = (3, 5, 8, 12)
DEVIATION = 0.02  # nats; the noise is multiplied by it


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
            Run(Path(f"{name}_{seed}"), name, seed, {"val/loss": float(loss)}, {})
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


# The attention track: a baseline whose loss falls as it did in the regime's trial, and entries.
BUDGETS, BASELINE_SEEDS, ENTRIES = (0.5, 1.0, 2.0, 4.0), 20, 55
TRACK_DEVIATION = 0.0045  # nats
EFFECTS = (1.0, 1.02, 1.05, 1.10)  # true effective compute; its inverse for every other entry


def baseline_loss(compute: float) -> float:
    """Return about the means of the trial: 1.579, 1.267, 1.111 and 1.007 nats."""
    return 0.955 + 0.312 / compute


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
    tables_wrong: int = 0  # tables with a wrong claim


def simulate_track(effect: float, tables: int) -> Claims:
    """Return what the two stages of the track say of entries with this effective compute."""
    generator = np.random.default_rng(round(1000 * effect))
    done = Claims()

    def draw(compute: float, n: int) -> list[float]:
        return (baseline_loss(compute) + TRACK_DEVIATION * generator.normal(size=n)).tolist()

    for _ in range(tables):
        base = {spent: draw(spent, BASELINE_SEEDS) for spent in BUDGETS}
        curve = fit_curve(base)
        truths = [effect if i % 2 else 1 / effect for i in range(ENTRIES)]
        losses = [draw(truth, 3) for truth in truths]
        verdicts, found = _look(base, losses, curve)
        later = [i for i, verdict in enumerate(verdicts) if verdict == "open"]
        for i in later:
            losses[i] += draw(truths[i], 5)
        if later:
            again, found = _look(base, losses, curve)
            verdicts = [again[i] if i in later else one for i, one in enumerate(verdicts)]
        done.second += len(later)
        wrong = 0
        for truth, verdict, one in zip(truths, verdicts, found, strict=True):
            claim = {"b": 1, "w": -1}.get(verdict[0], 0)
            sign = int(np.sign(round(np.log(truth), 9)))
            done.entries += 1
            done.right += claim != 0 and claim == sign
            wrong += claim not in (0, sign)
            done.equivalent += verdict == "equivalent"
            done.still_open += verdict == "open"
            done.held += one.interval[0] <= truth <= one.interval[1]
        done.wrong += wrong
        done.tables_wrong += wrong > 0
    return done


def _look(
    base: dict[float, list[float]], losses: list[list[float]], curve: Curve
) -> tuple[list[str], list[Effective]]:
    spreads = share_spread([base[1.0], *losses])[1:]
    found = [
        effective_compute(own, 1.0, curve, spread)
        for own, spread in zip(losses, spreads, strict=True)
    ]
    corrected = correct_holm([one.p for one in found])
    return [decide(p, one) for p, one in zip(corrected, found, strict=True)], found


def print_tracks(tables: int) -> None:
    """Print the table of docs/track.md."""
    cells = [
        [
            *("true effect", "right", "wrong", "tables with a wrong claim", "equivalent"),
            *("open", "second stage", "intervals that hold it"),
        ]
    ]
    for effect in EFFECTS:
        done = simulate_track(effect, tables)
        n = done.entries
        shares = [done.right / n, done.wrong / n, done.tables_wrong / tables]
        shares += [done.equivalent / n, done.still_open / n, done.second / n, done.held / n]
        cells.append([f"{effect - 1:.0%}", *(f"{share:.3f}" for share in shares)])
    print(markdown_table(cells))


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fields", type=int, default=1_000, help="reports per cell")
    parser.add_argument("--tracks", type=int, help="print the table of so many attention tracks")
    return parser


def main() -> None:
    """Print the tables that were asked for."""
    args = new_parser().parse_args()
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
    print(markdown_table(cells))
    heading = ["variants", *(f"n = {n}" for n in (2, 3, 4, 5, 6, 8, 10, 12))]
    cells = [heading]
    for variants in (2, 3, 4, 8):
        smallest = [
            statistics.smallest_difference(np.sqrt(2) * DEVIATION, int(name[4:]), variants - 1)
            for name in heading[1:]
        ]
        cells.append([str(variants), *(f"{value:.2g}" for value in smallest)])
    print(f"\n{markdown_table(cells)}")


if __name__ == "__main__":
    main()
