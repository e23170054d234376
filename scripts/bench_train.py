"""Measures training speed, memory and start-up against the peers' own models, in one run.

`make bench-train`, or in its environment: python scripts/bench_train.py
    [--sizes nano char gpt2_small] [--precisions 32-true bf16-mixed]
Prints tokens per second, ratios, and the share of the rate of matrix products in this precision;
peak memory, the time to the first step beside that of a bare import, and one line of JSON.

Every contender gets batches of the same shape, fused AdamW and gradient clipping. "bare" is a plain
loop around our model, the same as for the peers. "train.py" is the whole Lightning loop with its
callbacks, log rows and TensorBoard, as `python train.py` runs it, on a text of random characters.
All precisions take turns in one run, and a ratio is between contenders of the same one. In
bf16-mixed plain loops compute the loss under torch's autocast, as `train.py` does.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench import interleave, quiet_threads, ratio, record, spread, timed
from contenders import CHOICES, autocast
from peers import LANGUAGE_MODELS
from rich.console import Console
from torch import Tensor, nn

from gptattn.data.sampler import Batch, TrainingStream, training_batch
from gptattn.machine.device import matmul_flops_per_second, peak_memory_mb, reset_peak_memory
from gptattn.model.cost import measure_cost
from gptattn.model.gpt import GPT
from gptattn.runs.folder import RunFolder
from gptattn.settings.build import build_model
from gptattn.settings.compose import settings as settings_of
from gptattn.settings.config import Precision, TrainConfig
from gptattn.training.preflight import DTYPES, preflight
from gptattn.training.run import train

VARIANTS = ("mha", "gqa", "mqa", "mha_wrapper")
CPU = torch.device("cpu")
CHUNK = None  # tokens per chunk of the loss; None: the default


@dataclass(frozen=True)
class Size:
    """A model and batch to measure with, and how often."""

    model: str  # a name in conf/model
    batch_size: int  # rows
    context_length: int  # tokens
    vocab_size: int
    warm_up: int  # steps before the measured ones
    steps: int  # measured per round
    rounds: int


SIZES = {
    "nano": Size("nano", 12, 64, 256, warm_up=10, steps=40, rounds=5),
    "char": Size("char", 16, 256, 256, warm_up=1, steps=3, rounds=3),
    "gpt2_small": Size("gpt2_small", 2, 256, 50304, warm_up=1, steps=2, rounds=3),
}
MEMORY = Size("gpt2_small", 4, 512, 50304, warm_up=1, steps=2, rounds=1)


def overrides(size: Size, variant: str) -> list[str]:
    """Return the overrides that train this size."""
    return [
        f"attn={variant}",
        f"model={size.model}",
        f"model.context_length={size.context_length}",
        f"model.vocab_size={size.vocab_size}",
        "model.dropout=0",
        f"batch_size={size.batch_size}",
        f"budget.steps={size.warm_up + size.steps}",
        f"trainer.threads={torch.get_num_threads()}",
        "trainer=cpu",
        "validation.count=1",
        "checkpoint=false",
        "sample.tokens=0",
    ]


def stream(size: Size) -> Iterator[Batch]:
    """Yield batches of random ids and targets, each [batch_size, context_length]."""
    tokens = np.random.default_rng(0).integers(0, size.vocab_size, 500_000).astype(np.uint16)
    rows, length = size.batch_size, size.context_length
    return iter(TrainingStream(lambda step: training_batch(tokens, 0, step, rows, length)))


def logits_loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy from all logits at once, as the peers' models need it."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def our_loss(chunk: int | None, model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Return our model's loss, computed for `chunk` tokens at a time."""
    assert isinstance(model, GPT)
    return model.loss(ids, targets, chunk_tokens=chunk)


def bare_step(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    size: Size,
    precision: Precision = "32-true",
) -> Callable[[], float]:
    """Return a training step of a plain loop, the same for all models; it returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = stream(size)

    def step() -> float:
        ids, targets = next(batches)
        with autocast(precision, CPU):
            loss = loss_of(model, ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def our_model(size: Size, variant: str) -> GPT:
    """Build our model of this size."""
    return build_model(preflight(settings_of(overrides(size, variant))).cfg, vocab_size=256)


def peer_model(size: Size, name: str) -> nn.Module:
    """Build a peer's model with the sizes of ours."""
    model = our_model_config(size).model
    return LANGUAGE_MODELS[name](
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        d_model=model.d_model,
        context_length=model.context_length,
        vocab_size=size.vocab_size,
    )


def our_model_config(size: Size) -> TrainConfig:
    """Return the checked settings of our `mha` model of this size."""
    return preflight(settings_of(overrides(size, "mha"))).cfg


def bare_seconds(
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    size: Size,
    precision: Precision,
) -> float:
    """Return the seconds per step of a plain loop around a new model."""
    return timed(bare_step(build(), loss_of, size, precision), size.warm_up, size.steps)


def train_py_seconds(size: Size, variant: str, text: Path, precision: Precision) -> float:
    """Return wall seconds per step of the real loop, with all its work between two log rows."""
    log_every = min(10, size.warm_up)
    settings = [*overrides(size, variant), f"data.path={text}", f"log_every={log_every}"]
    cfg = preflight(settings_of([*settings, "data=text", f"trainer.precision={precision}"])).cfg
    with tempfile.TemporaryDirectory() as folder, Path("/dev/null").open("w") as null:
        train(cfg, Path(folder) / "run", Console(file=null))
        lines = RunFolder(Path(folder) / "run").rows_file.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    at = {row["step"]: row["time"] for row in rows if "train/loss" in row}
    return (at[size.warm_up + size.steps] - at[size.warm_up]) / size.steps


def contenders_of(size: Size, text: Path, precision: Precision) -> dict[str, Callable[[], float]]:
    """Return what is timed in one precision; all give seconds per step, `matmul` per FLOP."""
    ours = partial(our_loss, CHUNK)
    more = (size, precision)
    return {
        "matmul": lambda: 1 / matmul_flops_per_second(CPU, DTYPES[precision]),
        "bare mha": partial(bare_seconds, partial(our_model, size, "mha"), ours, *more),
        **{f"train.py {v}": partial(train_py_seconds, size, v, text, precision) for v in VARIANTS},
        **{
            f"peer {peer}": partial(
                bare_seconds, partial(peer_model, size, peer), logits_loss, *more
            )
            for peer in LANGUAGE_MODELS
        },
    }


def bench_speed(
    size: Size, text: Path, precisions: Sequence[Precision], file: Path | None
) -> dict[str, Any]:
    """Time all contenders at one size in each precision; print and return tokens/s and ratios.

    `file` is as in `record`. Names in the result begin with the precision, except for 32-true.
    """
    contenders = {
        (precision, name): measure
        for precision in precisions
        for name, measure in contenders_of(size, text, precision).items()
    }
    seconds = interleave(contenders, size.rounds, seed=1)
    print(
        f"\n{size.model}: batch {size.batch_size} x {size.context_length}, vocabulary "
        f"{size.vocab_size:,}, {size.rounds} rounds of {size.steps} steps"
    )
    result: dict[str, Any] = {}
    for precision in precisions:
        own = {name: seconds[key, name] for key, name in seconds if key == precision}
        prefix = "" if precision == "32-true" else f"{precision}: "
        matmul = own.pop("matmul")  # no contender: it has no place in the record
        rows = speed_rows(size, precision, own, matmul)
        record(file, f"{prefix}{size.model}", "train.py mha", own)
        result |= {f"{prefix}{name}": row for name, row in rows.items()}
    return result


def speed_rows(
    size: Size, precision: Precision, seconds: dict[str, list[float]], matmul: list[float]
) -> dict[str, dict[str, float]]:
    """Print and return the figures of the contenders of one precision; `matmul`: s per FLOP."""
    costs = {v: measure_cost(our_model(size, v)).flops_per_token for v in VARIANTS}
    tokens = size.batch_size * size.context_length
    loop = seconds["train.py mha"]
    print(
        f"{precision:26} {'tokens/s':>9} {'step ms':>9} {'spread':>7} {'/ train.py mha':>15}",
        end="",
    )
    print(f" {'of matmul':>10}")
    result = {}
    for contender, values in seconds.items():
        rate, over = tokens / median(values), ratio(loop, values)
        # The peers are GPT-2 too: they have the FLOPs of our mha.
        flops = tokens * costs.get(contender.rpartition(" ")[2], costs["mha"])
        share = flops * ratio(matmul, values)
        print(
            f"{contender:26} {rate:9,.0f} {1e3 * median(values):9.1f} {spread(values):7.1%} "
            f"{over:15.3f} {share:10.2f}"
        )
        result[contender] = {
            "tokens_per_s": round(rate),
            "over_train_py_mha": round(over, 4),
            "of_matmul": round(share, 4),
        }
    return result


MEMORY_CONTENDERS = ("gptattn", "gptattn, all logits", "train.py", *LANGUAGE_MODELS)


def memory_of(contender: str) -> None:
    """Print the contender's peak MB over a few steps; call this in a separate process."""
    if contender == "train.py":
        print(train_py_peak())
        return
    if contender.startswith("gptattn"):
        chunk = 10**9 if contender.endswith("logits") else CHUNK
        step = bare_step(our_model(MEMORY, "mha"), partial(our_loss, chunk), MEMORY)
    else:
        step = bare_step(peer_model(MEMORY, contender), logits_loss, MEMORY)
    reset_peak_memory(CPU)
    for _ in range(MEMORY.warm_up + MEMORY.steps):
        step()
    print(peak_memory_mb(CPU))


def train_py_peak() -> float:
    """Return the peak MB of a whole training run from its first step on, from its summary."""
    with tempfile.TemporaryDirectory() as folder:
        text = random_text(Path(folder))
        settings = [*overrides(MEMORY, "mha"), "data=text", f"data.path={text}"]
        with Path("/dev/null").open("w") as null:
            summary = train(
                preflight(settings_of(settings)).cfg, Path(folder) / "run", Console(file=null)
            )
    return summary["metrics"]["perf/peak_memory_training_mb"]


def random_text(folder: Path) -> Path:
    """Write 20,000 printable characters: enough to train on, and quick to validate."""
    text = folder / "text.txt"
    text.write_text("".join(map(chr, np.random.default_rng(0).integers(32, 127, 20_000))))
    return text


def bench_memory(threads: int) -> dict[str, float]:
    """Measure each contender in its own process; print and return the peak MB."""
    print(f"\npeak memory, gpt2_small, batch {MEMORY.batch_size} x {MEMORY.context_length}")
    peaks = {}
    for contender in MEMORY_CONTENDERS:
        command = [sys.executable, __file__, "--memory-of", contender, "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[contender] = float(done.stdout.split()[-1])
    leanest = min(peaks[peer] for peer in LANGUAGE_MODELS)
    for contender, peak in peaks.items():
        print(f"{contender:26} {peak:7,.0f} MB  {peak / leanest:6.3f} of the leanest peer's")
    return peaks


def first_step_seconds(text: Path) -> float:
    """Return the seconds from the start of `python train.py` to the line of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "train.py",
            "attn=gqa",
            f"run_dir={folder}/run",
            "budget.steps=1",
            "data=text",
            f"data.path={text}",
            "sample.tokens=0",
        ]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith("step 1"))
            seconds = time.perf_counter() - start
            process.communicate()
    return seconds


def import_seconds() -> float:
    """Return the seconds of a Python that only imports Lightning and Hydra."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import lightning.pytorch, hydra"], check=True)
    return time.perf_counter() - start


def bench_start(text: Path, rounds: int) -> dict[str, float]:
    """Time the first step and the bare import; print and return medians and their ratio."""
    contenders = {"import": import_seconds, "first step": partial(first_step_seconds, text)}
    seconds = interleave(contenders, rounds, seed=1)
    over = ratio(seconds["first step"], seconds["import"])
    print(
        f"\nfirst step after {median(seconds['first step']):.2f} s; "
        f"import lightning.pytorch, hydra: {median(seconds['import']):.2f} s; ratio {over:.2f}"
    )
    return {name: round(median(v), 2) for name, v in seconds.items()} | {"ratio": round(over, 3)}


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=CHOICES, default=["32-true"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, metavar="FILE", help="for bench_check.py")
    parser.add_argument("--rounds", type=int, help="instead of each size's own number")
    parser.add_argument("--start-rounds", type=int, default=5)
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--memory-of", choices=MEMORY_CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        torch.set_num_threads(args.threads)
        memory_of(args.memory_of)
        return
    quiet_threads(args.threads)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = random_text(Path(folder))
        if args.start_rounds:
            results["start"] = bench_start(text, args.start_rounds)
        for name in args.sizes:
            size = SIZES[name]
            rounds = args.rounds or size.rounds
            size = replace(size, rounds=rounds)
            results[name] = bench_speed(size, text, args.precisions, args.record)
    if not args.skip_memory:
        results["memory_mb"] = bench_memory(args.threads)
    print(json.dumps({"bench": "train", "threads": args.threads, "results": results}))


if __name__ == "__main__":
    main()
