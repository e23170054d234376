"""Training steps and peak memory, next to other libraries' own models.

Prints tokens per second, ratios, and the share of the rate of matrix products in each precision,
then peak memory at GPT-2 small.

Every contender gets batches of the same shape, fused AdamW and gradient clipping. "bare" is our
model in the peers' plain loop. "train.py" is a run's training step in Lightning's loop, as
`gptattn-compare speed=true` measures it, on a text of random characters. Precisions take turns too,
and ratios compare contenders of the same precision. In bf16-mixed, plain loops compute the loss
under torch's autocast, as `train.py` does.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from gptattn.build.model import build_model
from gptattn.cli.arguments import Count, option, parse
from gptattn.data.sampler import Batch, TrainingStream, training_batch
from gptattn.machine.device import (
    matmul_flops_per_second,
    peak_memory_mb,
    reset_peak_memory,
    resolve_device,
    synchronize,
)
from gptattn.model.cost import measure_cost
from gptattn.model.gpt import GPT
from gptattn.settings.compose import settings
from gptattn.settings.config import Precision, TrainConfig
from gptattn.training.preflight import DTYPES, PreparedRun, preflight
from gptattn.training.run import train
from gptattn.training.speed import Turn, interleave, train_steps
from measuring.menu import PEERS, VARIANTS, check_peers, check_variants, overrides_of
from measuring.peers import LANGUAGE_MODELS, Sizes
from measuring.tables import print_table, ratio, set_threads, spread, timed

ROOT = Path(__file__).parents[2]
DEVICE = resolve_device("auto")
ON_GPU = DEVICE.type == "cuda"
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """A model, its batch, and how often to measure it."""

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


@dataclass(frozen=True)
class Arguments:
    """sizes=[nano] variants=[mha,gqa+sink] peers=[]"""

    variants: tuple[str, ...] = option(VARIANTS, ("mha", "gqa", "mqa", "mha_wrapper"))
    peers: tuple[str, ...] = option(PEERS, tuple(LANGUAGE_MODELS))
    sizes: tuple[Literal["nano", "char", "gpt2_small"], ...] = option("model sizes", tuple(SIZES))
    precisions: tuple[Precision, ...] = option("such as 32-true,bf16-mixed", ("32-true",))
    rounds: Count | None = option("turns of each contender; the default depends on the size")
    threads: Count = option("CPU threads", 2)
    memory: bool = option("false: measure only speed", True)
    memory_of: str | None = option("measure only this contender's memory, in this process")


def measure(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Measure speed at each size, then memory; print and return the figures."""
    args = parse(Arguments, arguments)
    if args.memory_of:
        torch.set_num_threads(args.threads)
        return {"peak_mb": peak_mb(args.memory_of)}, 0
    set_threads(args.threads)
    names, peers = check_variants(args.variants), check_peers(args.peers, LANGUAGE_MODELS)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = random_text(Path(folder))
        for name in args.sizes:
            results[name] = measure_speed(SIZES[name], names, peers, text, args)
    if args.memory:
        results["memory_mb"] = measure_memory(names, peers, args.threads)
    return {"threads": args.threads, "results": results}, 0


# Speed


def measure_speed(
    size: Size, names: list[str], peers: list[str], text: Path, args: Arguments
) -> dict[str, Any]:
    """Time all contenders at one size in each precision; print and return tokens/s and ratios."""
    measures = {
        (precision, name): seconds_of
        for precision in args.precisions
        for name, seconds_of in contenders(size, names, text, precision, peers).items()
    }
    rounds = args.rounds or size.rounds
    seconds = interleave(measures, rounds)
    flops = {name: measure_cost(our_model(size, name)).flops_per_token for name in names}
    tokens = size.batch_size * size.context_length
    results: dict[str, Any] = {}
    for precision in args.precisions:
        by_name = {name: values for (key, name), values in seconds.items() if key == precision}
        products, rows = by_name.pop("matmul"), []
        for name, values in by_name.items():
            # The peers are GPT-2 too, with the FLOPs of our first contender.
            per_token = flops.get(name.partition(" ")[2], flops[names[0]])
            figures = {
                "tokens_per_s": tokens / median(values),
                "step_ms": 1e3 * median(values),
                "spread": spread(values),
                "over_first": ratio(by_name[f"train.py {names[0]}"], values),
                "of_matmul": tokens * per_token * ratio(products, values),
            }
            results[f"{precision}: {name}"] = figures
            form = "{tokens_per_s:,.0f} {step_ms:.1f} {spread:.1%} {over_first:.3f} {of_matmul:.2f}"
            rows.append([name, *form.format(**figures).split()])
        title = (
            f"{size.model}, {precision}: batch {size.batch_size} x {size.context_length}, "
            f"vocabulary {size.vocab_size:,}, {rounds} rounds of {size.steps} steps"
        )
        headings = ["", "tokens/s", "step ms", "spread", f"/ train.py {names[0]}", "of matmul"]
        print_table(title, headings, rows)
    return results


def contenders(
    size: Size, names: list[str], text: Path, precision: Precision, peers: list[str]
) -> dict[str, Turn]:
    """Return the turns in one precision: seconds per step, or per FLOP for `matmul`."""

    def in_plain_loop(build: Callable[[], nn.Module], loss_of: Loss) -> Turn:
        def seconds() -> float:
            step = plain_step(build().to(DEVICE), loss_of, size, precision)
            return timed(step, size.warm_up, size.steps, lambda: synchronize(DEVICE))

        return seconds

    overrides = ("data=text", f"data.path={text}", f"trainer.precision={precision}")
    ours = {name: prepare(size, name, *overrides) for name in names}
    return {
        "matmul": lambda: 1 / matmul_flops_per_second(DEVICE, DTYPES[precision]),
        f"bare {names[0]}": in_plain_loop(partial(our_model, size, names[0]), our_loss),
        **{
            f"train.py {v}": partial(train_steps, prepared, size.steps)
            for v, prepared in ours.items()
        },
        **{
            f"peer {peer}": in_plain_loop(partial(peer_model, size, peer), logits_loss)
            for peer in peers
        },
    }


def prepare(size: Size, name: str, *more: str) -> PreparedRun:
    """Return a run of this size and variant that is ready to train."""
    overrides = [
        f"model={size.model}",
        f"model.context_length={size.context_length}",
        f"model.vocab_size={size.vocab_size}",
        "model.dropout=0",
        f"batch_size={size.batch_size}",
        f"budget.steps={size.warm_up + size.steps}",
        f"trainer={'gpu' if ON_GPU else 'cpu'}",
        f"trainer.threads={torch.get_num_threads()}",
        "validation.count=1",
        "checkpoint=false",
        "sample.tokens=0",
    ]
    return preflight(settings([*overrides, *more, *overrides_of(name)]), shapes_only=True)


def our_model(size: Size, name: str) -> GPT:
    """Build our model of this size."""
    return build_model(prepare(size, name).cfg, vocab_size=256)


def peer_model(size: Size, peer: str) -> nn.Module:
    """Build a peer's model with our model's sizes."""
    model = settings([f"model={size.model}"]).model
    shape = model.num_layers, model.num_heads, model.d_model, size.context_length
    return LANGUAGE_MODELS[peer](Sizes(*shape, size.vocab_size))


def our_loss(
    model: nn.Module, ids: Tensor, targets: Tensor, chunk_tokens: int | None = None
) -> Tensor:
    """Return our model's loss, in chunks of the default size or of `chunk_tokens`."""
    assert isinstance(model, GPT)
    return model.loss(ids, targets, chunk_tokens=chunk_tokens)


def logits_loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy from all logits at once, as the peers' models need."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def plain_step(
    model: nn.Module, loss_of: Loss, size: Size, precision: Precision = "32-true"
) -> Callable[[], None]:
    """Return the training step of a plain loop, the same for all models."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = random_batches(size)
    first = [one.to(DEVICE) for one in next(batches)]

    def step() -> None:
        ids, targets = first if ON_GPU else next(batches)  # copying makes the host wait for a GPU
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = loss_of(model, ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def random_batches(size: Size) -> Iterator[Batch]:
    """Yield batches of random ids and targets, each [batch_size, context_length]."""
    tokens = np.random.default_rng(0).integers(0, size.vocab_size, 500_000).astype(np.uint16)
    rows, length = size.batch_size, size.context_length
    return iter(TrainingStream(lambda step: training_batch(tokens, 0, step, rows, length)))


def train_silently(cfg: TrainConfig, folder: Path) -> dict[str, Any]:
    """Train a run in the folder; return its summary."""
    with Path("/dev/null").open("w") as null:
        return train(cfg, folder / "run", Console(file=null))


def random_text(folder: Path) -> Path:
    """Write 20,000 printable characters: enough to train on, and quick to validate."""
    text = folder / "text.txt"
    text.write_text("".join(map(chr, np.random.default_rng(0).integers(32, 127, 20_000))))
    return text


# Memory


def measure_memory(names: list[str], peers: list[str], threads: int) -> dict[str, float]:
    """Train each contender in its own process; print and return the peak MB."""
    runs = [f"train.py {name}" for name in names]
    script, options = ROOT / "scripts" / "bench.py", ["train", f"threads={threads}"]
    peaks: dict[str, float] = {}
    for contender in (*runs, f"bare {names[0]}", f"bare {names[0]}, all logits", *peers):
        command = [sys.executable, str(script), *options, f"memory_of={contender}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks[contender] = json.loads(done.stdout.splitlines()[-1])["peak_mb"]
    base = min(peaks[peer] for peer in peers) if peers else peaks[runs[0]]
    rows = [[name, f"{peak:,.0f}", f"{peak / base:.3f}"] for name, peak in peaks.items()]
    title = f"peak memory, gpt2_small, batch {MEMORY.batch_size} x {MEMORY.context_length}"
    print_table(title, ["", "MB", "/ the leanest peer's" if peers else f"/ {runs[0]}"], rows)
    return peaks


def peak_mb(contender: str) -> float:
    """Return the contender's peak MB over a few steps; call this in a separate process."""
    kind, _, name = contender.partition(" ")
    if kind == "train.py":
        with tempfile.TemporaryDirectory() as folder:
            text = random_text(Path(folder))
            cfg = prepare(MEMORY, name, "data=text", f"data.path={text}").cfg
            summary = train_silently(cfg, Path(folder))
        return summary["metrics"]["perf/peak_memory_training_mb"]
    if kind == "bare":
        name, _, all_logits = name.partition(", ")
        loss_of = partial(our_loss, chunk_tokens=10**9 if all_logits else None)
        step = plain_step(our_model(MEMORY, name), loss_of, MEMORY)
    else:
        step = plain_step(peer_model(MEMORY, contender), logits_loss, MEMORY)
    reset_peak_memory(DEVICE)
    for _ in range(MEMORY.warm_up + MEMORY.steps):
        step()
    return peak_memory_mb(DEVICE) or 0.0
