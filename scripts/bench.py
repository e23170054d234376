"""What the benchmarks share: interleaved measurements, and their median, spread and ratios."""

import gc
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from gptattn.machine.device import device_name

Name = TypeVar("Name")  # of a contender
Measure = Callable[[], float]  # builds and warms up a contender; returns seconds per unit of work


def interleave(
    contenders: Mapping[Name, Measure], rounds: int, seed: int
) -> dict[Name, list[float]]:
    """Run every contender once per round, in a new random order; return the seconds by name.

    In a fixed order the position in the loop would bias the result: caches, clock speed and the
    load of other processes drift.
    """
    order, rng = list(contenders), random.Random(seed)
    seconds: dict[Name, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            gc.collect()
            seconds[name].append(contenders[name]())
    return seconds


def timed(step: Callable[[], object], warm_up: int, steps: int) -> float:
    """Return seconds per call: the mean of `steps` calls after `warm_up` further ones."""
    for _ in range(warm_up):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def record(file: Path | None, name: str, base: str, seconds: Mapping[str, Sequence[float]]) -> None:
    """Add a benchmark's seconds in each round to a file, for scripts/bench_check.py.

    `base` is the contender that the others are compared with.
    """
    if file is None:
        return
    known: dict[str, Any] = {"benchmarks": {}}
    if file.exists():
        known = json.loads(file.read_text())
    known |= {"processor": device_name(torch.device("cpu")), "torch": torch.__version__}
    known["benchmarks"][name] = {"base": base, "seconds": dict(seconds)}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(known, indent=1) + "\n")


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Return the median of the ratios within each round, so that drift between rounds cancels."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))


def spread(seconds: list[float]) -> float:
    """Return half of the interquartile range, divided by the median."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2 / median(ordered)


def quiet_threads(threads: int) -> None:
    """Set the thread count; print a note if the machine is busy."""
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: load is {load:.1f} before the start; figures are best on a quiet machine")
