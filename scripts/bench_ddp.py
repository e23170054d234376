"""Times a step of one process and of two that share its batch, and the exchange between them.

python scripts/bench_ddp.py [--rounds 5] [--steps 60] [SETTINGS]
Takes the settings of train.py, as `model=nano`, on an idle machine of two cores. In each round, in
a new order, train.py trains with one thread, with two, with two processes of one thread, and as two
runs side by side with half of the batch each: what two processes would take without an exchange.
Two processes then sum as many numbers as the model has gradients, and a bucket of DDP's, and do
nothing else. Prints medians over the rounds and their spread. The last line is JSON.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
from bench import interleave, ratio
from torch.multiprocessing.spawn import spawn

from gptattn.cli.main import check_job
from gptattn.errors import UserError
from gptattn.runs.folder import RunFolder
from gptattn.settings.build import build_model

QUICK = ("checkpoint=false", "sample.tokens=0", "validation.count=1")
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.threads=1")
BUCKET = 25 * 2**20  # bytes of gradients that DDP exchanges at a time
WARM_UP, REPEATS = 5, 50  # exchanges
FLOAT32 = 4  # bytes


def step_seconds(*runs: Sequence[str]) -> float:
    """Train these runs at the same time; return the mean of their medians over the steps."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        folders = [Path(folder, str(i)) for i in range(len(runs))]
        processes = [
            stack.enter_context(_started(to, run)) for to, run in zip(folders, runs, strict=True)
        ]
        if any(process.wait() for process in processes):
            sys.exit(f"error: a run failed: {' '.join(runs[0])}")
        summaries = [RunFolder(to).read_summary() for to in folders]
        return mean(one["metrics"]["perf/step_ms"] / 1e3 for one in summaries)


@contextlib.contextmanager
def _started(folder: Path, settings: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start train.py, and end it with the block."""
    command = [sys.executable, "train.py", *settings, *QUICK, f"hydra.run.dir={folder}"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


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
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        for piece in pieces:
            dist.all_reduce(piece)
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        Path(folder, "seconds").write_text(str(median(seconds[WARM_UP:])))
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print the steps and the exchange."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    given, settings = parser.parse_known_args()
    try:
        cfg = check_job([*settings, *TWO])
    except UserError as error:
        sys.exit(f"error: {error}")
    with torch.device("meta"):
        model = build_model(cfg, 256)  # ids, as of bytes
    params = sum(p.numel() for p in model.parameters())
    own = (*settings, f"budget.steps={given.steps}")
    half = (*own, "trainer=cpu", "trainer.threads=1", f"batch_size={cfg.batch_size // 2}")
    ways: dict[str, Callable[[], float]] = {
        "one process, one thread": lambda: step_seconds((*own, "trainer=cpu", "trainer.threads=1")),
        "one process, two threads": lambda: step_seconds(
            (*own, "trainer=cpu", "trainer.threads=2")
        ),
        "two processes": lambda: step_seconds((*own, *TWO)),
        "two runs of half the batch": lambda: step_seconds(half, half),
        "exchange of the gradients": lambda: exchange_seconds(params),
        "exchange of a bucket": lambda: exchange_seconds(BUCKET // FLOAT32),
    }
    seconds = interleave(ways, given.rounds, seed=0)
    print(f"{params:,} parameters, {FLOAT32 * params / 1e6:.2f} MB of gradients")
    alone = seconds["one process, one thread"]
    for name, found in seconds.items():
        spread = f"{1e3 * min(found):.1f} to {1e3 * max(found):.1f}"
        print(
            f"{name:27} {1e3 * median(found):7.1f} ms ({spread}), "
            f"{ratio(found, alone):.2f} of one process"
        )
    for name, size in (("the gradients", FLOAT32 * params), ("a bucket", BUCKET)):
        rate = size / median(seconds[f"exchange of {name}"]) / 1e6
        print(f"of {name}, each process sends {size / 1e6:.2f} MB at {rate:,.0f} MB/s")
    print(json.dumps({"params": params, "seconds": seconds}))


if __name__ == "__main__":
    main()
