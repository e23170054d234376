"""Two processes that share a batch, beside one with one thread and one with two.

Takes the settings of train.py, as `model=nano`, on an idle machine of two cores. Each round trains
with train.py in each way; then two processes exchange as much as the gradients, in DDP's buckets,
and do nothing else.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from gptattn.errors import UserError
from gptattn.runs.folder import RunFolder
from gptattn.settings.build import build_model
from gptattn.settings.compose import settings
from gptattn.training.preflight import preflight
from measuring.rounds import Measure, interleave, option_parser, print_table, ratio

ROOT = Path(__file__).parents[2]
QUICK = ("checkpoint=false", "sample.tokens=0", "validation.count=1")
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.threads=1")
BUCKET = 25 * 2**20  # bytes of gradients that DDP exchanges at a time
WARM_UP, REPEATS = 5, 50  # exchanges
FLOAT32 = 4  # bytes
IDS = 256  # of bytes


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = option_parser("ddp", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="of train.py")
    return parser


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Measure the steps and the exchange; print and return their seconds."""
    try:
        cfg = preflight(settings([*args.settings, *TWO])).cfg
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    with torch.device("meta"):
        params = sum(p.numel() for p in build_model(cfg, IDS).parameters())
    own = (*args.settings, f"budget.steps={args.steps}")
    measures: dict[str, Measure] = {
        "one process, one thread": partial(step_seconds, *own, "trainer=cpu", "trainer.threads=1"),
        "one process, two threads": partial(step_seconds, *own, "trainer=cpu", "trainer.threads=2"),
        "two processes": partial(step_seconds, *own, *TWO),
        "exchange of the gradients": partial(exchange_seconds, params),
    }
    seconds = interleave(measures, args.rounds)
    rows = []
    for name, found in seconds.items():
        ends = f"{1e3 * min(found):.1f} to {1e3 * max(found):.1f}"
        over = ratio(found, seconds["one process, one thread"])
        rows.append([name, f"{1e3 * median(found):.1f}", ends, f"{over:.2f}"])
    title = f"{params:,} parameters, {FLOAT32 * params / 1e6:.2f} MB of gradients"
    print_table(title, ["", "ms", "lowest to highest", "/ one process"], rows)
    rate = FLOAT32 * params / median(seconds["exchange of the gradients"]) / 1e6
    print(f"the exchange sends {rate:,.0f} MB/s")
    return {"params": params, "seconds": seconds}, 0


def step_seconds(*overrides: str) -> float:
    """Train a run; return the median seconds of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides, *QUICK, f"run_dir={folder}"]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"error: a run failed: {' '.join(overrides)}")
        return RunFolder(Path(folder)).read_summary()["metrics"]["perf/step_ms"] / 1e3


def exchange_seconds(numbers: int) -> float:
    """Let two processes sum so many float32 numbers; return the median seconds."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_exchange, (folder, numbers), nprocs=2)
        return float(Path(folder, "seconds").read_text())


def _exchange(rank: int, folder: str, numbers: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    pieces = torch.zeros(numbers).split(BUCKET // FLOAT32)
    seconds = []
    dist.barrier()
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        for piece in pieces:
            dist.all_reduce(piece)
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "seconds").write_text(str(median(seconds[WARM_UP:])))
    dist.barrier()
    dist.destroy_process_group()
