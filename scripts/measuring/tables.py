"""What all parts of the benchmark share: times, their ratios and spread, threads, and tables."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def timed(
    step: Callable[[], object],
    warm_up: int,
    steps: int,
    wait: Callable[[], object] = lambda: None,
) -> float:
    """Return seconds per call: the mean of `steps` calls, after `warm_up` calls that do not count.

    `wait` waits for a GPU, before the clock starts and before it stops.
    """
    for _ in range(warm_up):
        step()
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - start) / steps


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median of the rounds' ratios, so that drift between rounds cancels."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))


def spread(seconds: Sequence[float]) -> float:
    """Return half the interquartile range, divided by the median."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2 / median(ordered)


def set_threads(threads: int) -> None:
    """Set the thread count; print a note if the machine is busy."""
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: the machine is busy (load {load:.1f}); measure on a quiet one")


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with names in the first column and numbers in the others."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)
