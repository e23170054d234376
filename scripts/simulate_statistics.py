"""Simulates variants of equal mean loss and counts how often the report claims a difference.

`python scripts/simulate_statistics.py [--fields 1000]` prints the tables of docs/comparing.md: the
shares of false claims, decided by the code of the report, and the smallest difference that a number
of seeds can show.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from gptattn.compare import statistics
from gptattn.compare.comparison import Section, compare
from gptattn.compare.finished_runs import Run
from gptattn.compare.table import markdown_table

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
    runs = [
        Run(Path(f"{name}_{seed}"), name, seed, {"val/loss": float(loss)}, {"attn": name})
        for name, row in zip(names, losses, strict=True)
        for seed, loss in enumerate(row)
    ]
    (found,) = compare(runs).sections
    return found


def false_claims(noise: str, variants: int, n: int, fields: int) -> tuple[float, float]:
    """Return the shares of reports with a false claim: about the baseline, about the best row."""
    generator = np.random.default_rng([variants, n])
    rows = firsts = 0
    for _ in range(fields):
        found = section(DEVIATION * NOISE[noise](generator, (variants, n)))
        rows += any(row.difference and row.difference.shown for row in found.rows)
        firsts += len(found.alike) < variants - 1
    return rows / fields, firsts / fields


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fields", type=int, default=1_000, help="reports per cell")
    fields = parser.parse_args().fields
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
