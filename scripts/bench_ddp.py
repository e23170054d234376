"""Times a step of one process and of two that share its batch, and the exchange between them.

python scripts/bench_ddp.py [--rounds 5] [--steps 60] [SETTINGS]
Takes the settings of train.py, as `model=nano`, on an idle machine of two cores. In each round, in
a new order, train.py trains with one thread, with two, and with two processes of one thread. What
two processes cost more than half of one is then taken apart, in bare loops that train on half of
the batch each: as if alone; waiting for each other after each step; exchanging gradients as well.
Last, two processes exchange as much as the gradients, and a bucket of DDP's, and do nothing else.
Prints medians over the rounds and their spread. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from bench import interleave, ratio
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from gptattn.errors import UserError
from gptattn.model.gpt import GPT
from gptattn.runs.folder import RunFolder
from gptattn.settings.build import build_model
from gptattn.settings.compose import settings as settings_of
from gptattn.training.preflight import preflight

QUICK = ("checkpoint=false", "sample.tokens=0", "validation.count=1")
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.threads=1")
BUCKET = 25 * 2**20  # bytes of gradients that DDP exchanges at a time
WARM_UP, REPEATS = 5, 50  # steps of a bare loop, exchanges
FLOAT32 = 4  # bytes
IDS = 256  # of bytes


def step_seconds(*settings: str) -> float:
    """Train a run; return the median seconds of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *settings, *QUICK, f"run_dir={folder}"]
        root = Path(__file__).parents[1]
        if subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"error: a run failed: {' '.join(settings)}")
        return RunFolder(Path(folder)).read_summary()["metrics"]["perf/step_ms"] / 1e3


def half_seconds(settings: Sequence[str], how: str) -> float:
    """Let two processes train a model, each on half of the batch; return the median seconds.

    `how`: "apart", "waiting" for each other after each step, or "exchanging" gradients as well.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_half, (folder, settings, how), nprocs=2)
        return float(Path(folder, "seconds").read_text())


class _Loss(nn.Module):
    """A model whose forward pass is its loss, as DDP needs it."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.loss(ids, ids)


def _half(rank: int, folder: str, settings: Sequence[str], how: str) -> None:
    _meet(rank, folder)
    cfg = preflight(settings_of(settings)).cfg
    loss = _Loss(build_model(cfg, IDS))
    params = list(loss.parameters())
    optimizer = torch.optim.AdamW(params, fused=True)
    if how == "exchanging":
        loss = DistributedDataParallel(loss, gradient_as_bucket_view=True)
    ids = torch.randint(IDS, (cfg.batch_size // 2, cfg.model.context_length))

    def step() -> None:
        loss(ids).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if how != "apart":
            dist.barrier()

    _time(rank, folder, step)


def exchange_seconds(numbers: int) -> float:
    """Let two processes sum so many float32 numbers; return the median seconds."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_exchange, (folder, numbers), nprocs=2)
        return float(Path(folder, "seconds").read_text())


def _exchange(rank: int, folder: str, numbers: int) -> None:
    _meet(rank, folder)
    pieces = torch.zeros(numbers).split(BUCKET // FLOAT32)

    def exchange() -> None:
        for piece in pieces:
            dist.all_reduce(piece)

    _time(rank, folder, exchange)


def _meet(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)


def _time(rank: int, folder: str, action: Callable[[], object]) -> None:
    """Repeat the action; the first process writes its median seconds. Then both part."""
    seconds = []
    dist.barrier()
    for _ in range(WARM_UP + REPEATS):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        Path(folder, "seconds").write_text(str(median(seconds[WARM_UP:])))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print the steps and the exchange."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    given, settings = parser.parse_known_args()
    try:
        cfg = preflight(settings_of([*settings, *TWO])).cfg
    except UserError as error:
        sys.exit(f"error: {error}")
    with torch.device("meta"):
        model = build_model(cfg, IDS)
    params = sum(p.numel() for p in model.parameters())
    own = (*settings, f"budget.steps={given.steps}")
    ways: dict[str, Callable[[], float]] = {
        "one process, one thread": lambda: step_seconds(*own, "trainer=cpu", "trainer.threads=1"),
        "one process, two threads": lambda: step_seconds(*own, "trainer=cpu", "trainer.threads=2"),
        "two processes": lambda: step_seconds(*own, *TWO),
        "halves apart": lambda: half_seconds(settings, "apart"),
        "halves, waiting": lambda: half_seconds(settings, "waiting"),
        "halves, exchanging": lambda: half_seconds(settings, "exchanging"),
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
