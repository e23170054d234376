"""What waiting threads cost: `python scripts/bench_waiting.py` (Linux, nothing else running).

Runs of train.py at model=tiny, alone and beside one that began before, with how threads wait left
to the command, to torch, and set to passive; interleaved in random order. tokens/s, medians.
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
HEAD_START = 8.0  # seconds until the neighbour trains
WAYS = {
    "train.py's own": {},
    "torch's": {"GOMP_SPINCOUNT": "300000"},  # what libgomp does where nothing is said
    "passive": {"OMP_WAIT_POLICY": "passive"},
}


def started(folder: Path, way: str, steps: int) -> subprocess.Popen[bytes]:
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
    """Of one run, beside another one that waits in the way of `neighbour`."""
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
