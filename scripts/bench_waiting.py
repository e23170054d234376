"""Measures what waiting threads cost: `python scripts/bench_waiting.py` (Linux, idle machine).

OpenMP threads can spin or sleep while they wait. Runs train.py at model=tiny, alone and beside
another run that started before, with three ways of waiting: as train.py sets it, as torch does by
default, and passive. The runs are interleaved in random order. Prints median tokens/s.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from gptattn.runs.folder import RunFolder

ROUNDS = 3
STEPS = 100
HEAD_START = 8.0  # seconds until the other run trains
WAYS = {
    "train.py's own": {},
    "torch's": {"GOMP_SPINCOUNT": "300000"},  # libgomp's default
    "passive": {"OMP_WAIT_POLICY": "passive"},
}


def started(folder: Path, way: str, steps: int) -> subprocess.Popen[bytes]:
    """Start train.py with one of WAYS, without the caller's OpenMP settings."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    settings = ("model=tiny", "checkpoint=false", "sample.tokens=0", "validation.count=1")
    return subprocess.Popen(
        [sys.executable, "train.py", *settings, f"budget.steps={steps}", f"hydra.run.dir={folder}"],
        cwd=Path(__file__).parents[1],
        env=plain | WAYS[way],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def tokens_per_s(folder: Path, way: str, neighbour: str | None) -> float:
    """Return the speed of one run, alone or beside another run that waits as `neighbour` says."""
    other = None if neighbour is None else started(folder / "other", neighbour, 10**6)
    try:
        if other is not None:
            time.sleep(HEAD_START)
        if started(folder / "run", way, STEPS).wait():
            sys.exit(f"a run failed, in {folder}")
    finally:
        if other is not None:
            other.kill()
            other.wait()
    record = RunFolder(folder / "run").read_summary()
    return record["metrics"]["perf/tokens_per_s"]


def main() -> None:
    """Run the benchmark and print a Markdown table."""
    cells = [(way, None) for way in WAYS]
    cells += [("torch's", "torch's"), ("train.py's own", "torch's")]
    cells.append(("train.py's own", "train.py's own"))
    jobs = cells * ROUNDS
    random.Random(0).shuffle(jobs)
    found: dict[tuple[str, str | None], list[float]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        for i, cell in enumerate(jobs):
            found[cell].append(tokens_per_s(Path(folder, str(i)), *cell))
            print(f"{i + 1}/{len(jobs)}", end="\r", file=sys.stderr)
    alone = median(found["torch's", None])
    print("| waits as | beside | tokens/s | lowest to highest | of torch's, alone |")
    print("| --- | --- | ---: | ---: | ---: |")
    for (way, neighbour), values in found.items():
        middle = median(values)
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        beside = "nothing" if neighbour is None else f"a run that waits as {neighbour}"
        print(f"| {way} | {beside} | {middle:,.0f} | {spread} | {middle / alone:.2f} |")


if __name__ == "__main__":
    main()
