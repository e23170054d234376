"""Two processes that share a batch, next to one process with one thread and one with two.

Needs an idle machine with two cores. Each round trains once in each way. Other arguments are
settings of train.py.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gptattn.build.model import build_model
from gptattn.cli.arguments import Count, option, parse_own
from gptattn.runs.folder import RunFolder
from gptattn.settings.compose import settings
from gptattn.training.preflight import preflight
from gptattn.training.speed import Turn, interleave
from measuring.tables import print_table, ratio

ROOT = Path(__file__).parents[2]
QUICK = ("checkpoint=false", "sample.tokens=0", "validation.count=1")
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.threads=1")
FLOAT32 = 4  # bytes
IDS = 256  # bytes as tokens


@dataclass(frozen=True)
class Arguments:
    """model=nano"""

    rounds: Count = option("turns of each contender", 5)
    steps: Count = option("steps per run", 60)


def measure(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Time the steps in turns; print and return their seconds."""
    args, overrides = parse_own(Arguments, arguments)
    cfg = preflight(settings([*overrides, *TWO]), shapes_only=True).cfg
    with torch.device("meta"):
        params = sum(p.numel() for p in build_model(cfg, IDS).parameters())
    run = (*overrides, f"budget.steps={args.steps}")
    measures: dict[str, Turn] = {
        "one process, one thread": partial(step_seconds, *run, "trainer=cpu", "trainer.threads=1"),
        "one process, two threads": partial(step_seconds, *run, "trainer=cpu", "trainer.threads=2"),
        "two processes": partial(step_seconds, *run, *TWO),
    }
    seconds = interleave(measures, args.rounds)
    rows = []
    for name, values in seconds.items():
        ends = f"{1e3 * min(values):.1f} to {1e3 * max(values):.1f}"
        over = ratio(values, seconds["one process, one thread"])
        rows.append([name, f"{1e3 * median(values):.1f}", ends, f"{over:.2f}"])
    title = f"{params:,} parameters, {FLOAT32 * params / 1e6:.2f} MB of gradients"
    print_table(title, ["", "ms", "lowest to highest", "/ one process"], rows)
    return {"params": params, "seconds": seconds}, 0


def step_seconds(*overrides: str) -> float:
    """Train a run; return its median seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides, *QUICK, f"run_dir={folder}"]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"error: a run failed: {' '.join(overrides)}")
        return RunFolder(Path(folder)).read_summary()["metrics"]["perf/step_ms"] / 1e3
