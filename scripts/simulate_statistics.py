"""Simulates reports and counts how often they are wrong, decided by the report's own code.

`python scripts/simulate_statistics.py [--fields 1000]` prints the tables of docs/comparing.md: the
shares of false claims on variants of equal mean loss, and the smallest difference that a number of
seeds can show. `--ladders 1000` prints the table of docs/evidence.md instead: how often the
intervals of a ladder's multipliers all hold the true ones.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from gptattn.compare import statistics
from gptattn.compare.comparison import Section, make_section
from gptattn.compare.finished_runs import Run
from gptattn.compare.ladder import Ladder, multipliers
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


SIZES, GROWTH = 5, 4.0  # of a ladder: each size has 4 times the compute of the one before
# How the standard deviation over seeds, 0.01 nats in the middle, goes from first size to last.
SPREAD = {
    "equal at all sizes": (1.0, 1.0),
    "falls to a quarter": (2.0, 0.5),
    "rises to four times": (0.5, 2.0),
}


def joint_coverage(spread: str, variants: int, n: int, ladders: int) -> float:
    """Return the share of ladders in which every interval holds the variant's true multiplier."""
    generator = np.random.default_rng([variants, n])
    deviations = 0.01 * np.geomspace(*SPREAD[spread], SIZES)[:, None]
    factors = {"mha": 1.0} | {f"v{i}": 1 + i / 50 for i in range(1, variants)}
    spent = 1e12 * np.power(GROWTH, np.arange(SIZES), dtype=np.float64)
    compute = {name: spent * (1 - i / 20) for i, name in enumerate(factors)}
    held = 0
    for _ in range(ladders):
        losses = {
            name: 1.2
            + factor * (compute[name][:, None] / 1e13) ** -0.2
            + deviations * generator.normal(size=(SIZES, n))
            for name, factor in factors.items()
        }
        reached = max(own[-1].mean() for own in losses.values())
        found = multipliers(Ladder(compute, losses), "mha", reached)
        ends = {name: one.interval or (0.0, np.inf) for name, one in found.items()}
        # The same loss at A ** (1 / 0.2) times the compute.
        held += all(low <= factors[name] ** 5 <= high for name, (low, high) in ends.items())
    return held / ladders


def print_ladders(ladders: int) -> None:
    """Print the table of joint coverage."""
    cells = [["spread over seeds", "seeds", *(f"{variants} variants" for variants in (2, 3, 4))]]
    for spread in SPREAD:
        for n in (3, 5):
            shares = [joint_coverage(spread, variants, n, ladders) for variants in (2, 3, 4)]
            cells.append([spread, str(n), *(f"{share:.3f}" for share in shares)])
    print(markdown_table(cells))


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fields", type=int, default=1_000, help="reports per cell")
    parser.add_argument("--ladders", type=int, help="print the table of ladders, of so many each")
    return parser


def main() -> None:
    """Print the tables that were asked for."""
    args = new_parser().parse_args()
    if args.ladders is not None:
        print_ladders(args.ladders)
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
