"""What is measured on one GPU: items, each made of cells, the most decisive first.

Variants are named as in `menu.py`: `mha+sink`, `mha:compile=true`.
"""

import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor, _dynamo, nn
from torch.profiler import profile

from gptattn.attention import Attention, Shared
from gptattn.build.model import build_layer, build_model
from gptattn.errors import ConfigError
from gptattn.machine import device
from gptattn.model.cost import measure_cost
from gptattn.model.gpt import GPT
from gptattn.model.loss import linear_cross_entropy, logits_to_gradient
from gptattn.settings.config import TrainConfig
from gptattn.training.compiling import compile_blocks
from gptattn.training.preflight import PreparedRun
from gptattn.training.speed import decode_tokens
from measuring import train
from measuring.peers import LANGUAGE_MODELS
from measuring.tables import spread, timed
from measuring.train import DEVICE, ON_GPU, Size, logits_loss, our_loss

Cell = dict[str, Any]  # plain values for JSON; `error` or `not_here` says why there are none
BF16, WAIT = torch.bfloat16, partial(device.synchronize, DEVICE)
TO_GRADIENT = torch.compile(logits_to_gradient, fullgraph=True)
GPU = Size("gpt2_small", 16, 1024, 50304, warm_up=5, steps=15, rounds=3)
TINY = Size("tiny", 2, 64, 320, warm_up=1, steps=1, rounds=1)
OF_FLA: dict[str, tuple[str, str, dict[str, Any]]] = {  # the nearest layers, with equal sizes
    "kda": ("kda", "KimiDeltaAttention", {"head_dim": 64}),
    "lightning": ("simple_gla", "SimpleGatedLinearAttention", {"use_short_conv": False}),
    "gated_deltanet": ("gated_deltanet", "GatedDeltaNet", {"head_dim": 64, "expand_v": 1}),
}


@dataclass(frozen=True)
class Lab:
    """A folder for a text, and sizes. `tiny`: small sizes for a CPU, without compiling."""

    tiny: bool
    folder: Path

    @property
    def size(self) -> Size:
        return TINY if self.tiny else GPU

    def prepare(self, name: str, *more: str) -> PreparedRun:
        """Return a run of this variant that is ready to train, with every `auto` resolved."""
        text, cache = train.random_text(self.folder), self.folder / "cache"
        data = "data=text", f"data.path={text}", f"cache_dir={cache}", "checks=false"
        if self.tiny:
            name = name.replace("compile=true", "compile=false").replace("50257", "257")
        return train.prepare(self.size, name, "trainer.precision=bf16-mixed", *data, *more)

    def model(self, cfg: TrainConfig) -> GPT:
        """Build a model with random weights, the same for equal settings."""
        torch.manual_seed(0)
        torch.set_float32_matmul_precision(cfg.trainer.matmul_precision)
        model = build_model(cfg, vocab_size=256).to(DEVICE)
        compile_blocks(cfg, model)
        model.to_gradient = TO_GRADIENT if cfg.compile else None
        return model

    def time(self, step: Callable[[], object]) -> Cell:
        """Return the milliseconds of a call: the rounds' median and spread."""
        warm_up = [self.size.warm_up] + [0] * (self.size.rounds - 1)
        seconds = [timed(step, first, self.size.steps, WAIT) for first in warm_up]
        return {"ms": 1e3 * median(seconds), "spread": spread(seconds)}

    def step(self, model: nn.Module, loss_of: train.Loss, rows: int) -> Callable[[], None]:
        """Return a training step of a plain loop."""
        size = replace(self.size, batch_size=rows, vocab_size=256 if self.tiny else 50257)
        return train.plain_step(model, loss_of, size, "bf16-mixed")

    def time_steps(self, model: nn.Module, loss_of: train.Loss, rows: int) -> Cell:
        """Return a plain loop's speed and memory, and our model's share of the rate of products."""
        device.reset_peak_memory(DEVICE)
        figures = self.time(self.step(model, loss_of, rows))
        figures["tokens_per_s"] = 1e3 * rows * self.size.context_length / figures["ms"]
        figures["peak_mb"] = device.peak_memory_mb(DEVICE)
        if isinstance(model, GPT):
            figures |= self.rate(figures["tokens_per_s"] * measure_cost(model).flops_per_token)
        counts = _dynamo.utils.counters
        breaks = sum(counts["graph_break"].values())
        return figures | {"graphs": counts["stats"]["unique_graphs"], "breaks": breaks}

    def rate(self, flops_per_s: float) -> Cell:
        """Return TFLOP/s, and their share of the current rate of matrix products."""
        share = flops_per_s / self.product_rate(0.4)[1]
        return {"tflops": flops_per_s / 1e12, "of_products": share}

    def product_rate(self, seconds: float) -> tuple[float, float]:
        """Return the FLOP/s of large bf16 matrix products: the best, and the last half's."""
        n = 128 if self.tiny else 8192
        a, b = (torch.randn(n, n, device=DEVICE, dtype=BF16) for _ in range(2))
        times, begun = list[float](), time.perf_counter()
        while len(times) < 4 or (time.perf_counter() - begun < seconds and not self.tiny):
            times.append(timed(lambda: a @ b, 0, 10, WAIT))
        last = times[len(times) // 2 :]
        return 2 * n**3 / min(times), 2 * n**3 * len(last) / sum(last)


def run_cell(lab: Lab, item: str, cell: str) -> Cell:
    """Return the cell's values, its error, or what this CPU lacks for it."""
    _dynamo.reset()  # graphs of all models count towards one limit
    _dynamo.utils.counters.clear()
    try:
        values = ITEMS[item].take(lab, cell)
    except Exception as error:
        lacks = not ON_GPU and isinstance(error, ConfigError | ModuleNotFoundError)
        values = {"not_here" if lacks else "error": f"{type(error).__name__}: {str(error)[:300]}"}
        if not lacks:
            traceback.print_exc()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return values


def describe_device(lab: Lab, _: str) -> Cell:
    """Return versions, and the rates of a copy and of products: best, and after two seconds."""
    names = ("torch", "triton", "lightning", "fla-core", "transformers", "litgpt", "x-transformers")
    figures: Cell = {one.name: one.version for one in distributions() if one.name in names}
    figures |= {"device": device.device_name(DEVICE), "lacks": device.missing_compiler(DEVICE)}
    one = torch.zeros(2**20 if lab.tiny else 2**30, dtype=torch.uint8, device=DEVICE)
    figures["copied_gb_per_s"] = 2e-6 * one.nbytes / lab.time(one.clone)["ms"]
    best, sustained = lab.product_rate(4)
    return figures | {"tflops": sustained / 1e12, "best_tflops": best / 1e12}


def profile_steps(lab: Lab, name: str) -> Cell:
    """Return the kernels' (on a CPU, operators') sum over a step's time, and the longest ones."""
    cfg = lab.prepare(name).cfg
    step = lab.step(lab.model(cfg), our_loss, cfg.batch_size)
    wall = lab.time(step)["ms"]
    with profile() as run:
        timed(step, 0, 3, WAIT)
    kind, where = ("CUDA", "device") if ON_GPU else ("CPU", "cpu")
    kernels = [
        (getattr(one, f"self_{where}_time_total") / 3e3, one.count / 3, one.key[:120])
        for one in run.key_averages()
        if one.device_type.name == kind and not one.is_user_annotation
    ]
    rows = [f"{ms:.3f} ms, {count:g} x {key}" for ms, count, key in sorted(kernels, reverse=True)]
    total, words = sum(ms for ms, *_ in kernels), ("attention", "flash", "fmha", "sdpa")
    return {
        "wall_ms": wall,
        "kernels_ms": total,
        "kernels_over_wall": total / wall,
        "kernels": sum(count for _, count, _ in kernels),
        "longest": rows[:30],
        "attention": [row for row in rows if any(word in row.lower() for word in words)],
    }


def measure_head(lab: Lab, name: str) -> Cell:
    """Return the time of the head and loss alone, forward and backward, on one batch."""
    cfg = lab.prepare(name).cfg
    tokens = cfg.batch_size * cfg.model.context_length
    ids, width = cfg.model.vocab_size or 256, cfg.model.d_model
    x, weight = (torch.randn(n, width, device=DEVICE) for n in (tokens, ids))
    inputs = x.requires_grad_(), (0.02 * weight).requires_grad_()
    targets, chunk = torch.randint(ids, (tokens,), device=DEVICE), cfg.loss_chunk_tokens
    to_gradient = TO_GRADIENT if cfg.compile else None

    def step() -> None:
        with torch.autocast(DEVICE.type, BF16):
            loss = linear_cross_entropy(*inputs, targets, chunk, to_gradient)
        torch.autograd.grad(loss, inputs)

    figures = lab.time(step)
    return figures | lab.rate(6e3 * tokens * weight.numel() / figures["ms"])


def measure_step(lab: Lab, name: str) -> Cell:
    """Return the time of a plain loop's step, and the model's backend."""
    cfg = lab.prepare(name).cfg
    figures = lab.time_steps(lab.model(cfg), our_loss, cfg.batch_size)
    return {"backend": cfg.attn.get("backend"), **figures}


class WallClock(L.Callback):
    """Times a run between two of its steps."""

    between: ClassVar[tuple[int, int]]
    seconds: ClassVar[float]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Start or stop the clock."""
        if trainer.global_step in self.between:
            WAIT()
            WallClock.seconds = time.perf_counter() - WallClock.seconds


def measure_run(lab: Lab, log_every: str) -> Cell:
    """Return the speed of `train.py`, including its rows of metrics."""
    first, last = WallClock.between = (2, 4) if lab.tiny else (50, 250)
    WallClock.seconds = 0.0
    clock = "trainer.callbacks={clock: {_target_: measuring.gpu_items.WallClock}}"
    more = clock, "allow_targets=[measuring]", f"budget.steps={last}", log_every
    prepared = lab.prepare(MODES[0], *more)
    with tempfile.TemporaryDirectory() as folder:
        train.train_silently(prepared.cfg, Path(folder))
    steps_per_s = (last - first) / WallClock.seconds
    speed = steps_per_s * lab.size.batch_size * lab.size.context_length
    return {"tokens_per_s": speed, **lab.rate(speed * prepared.cost.flops_per_token)}


def measure_peer(lab: Lab, name: str) -> Cell:
    """Return the time of a peer's step in the plain loop, eager or compiled with its loss."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    peer, _, compiled = name.partition(" ")
    loss_of = torch.compile(logits_loss) if compiled and not lab.tiny else logits_loss
    return lab.time_steps(train.peer_model(lab.size, peer).to(DEVICE), loss_of, lab.size.batch_size)


def compare_gradients(lab: Lab, name: str) -> Cell:
    """Return the errors of one step's bf16 gradients, eager and compiled, against float32."""
    ids = torch.randint(256, (2, 4, lab.size.context_length), device=DEVICE)
    gradients: list[Tensor] = []
    for compiled, mixed in (("false", False), ("false", True), ("true", True)):
        model = lab.model(lab.prepare(f"{name}:compile={compiled}").cfg)
        if not mixed:
            torch.set_float32_matmul_precision("highest")
        with torch.autocast(DEVICE.type, BF16, enabled=mixed):
            mean = model.loss(*ids)
        grads = torch.autograd.grad(mean, [*model.parameters()])
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    exact, eager, compiled_grad = gradients
    return {"eager": error_of(eager, exact), "compiled": error_of(compiled_grad, exact)}


def error_of(x: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over the norm of the exact values."""
    exact = exact.double()
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def time_layer(lab: Lab, layer: nn.Module, mixed: bool) -> Cell:
    """Return the time of one layer, forward and backward, eager and compiled."""
    shape = lab.size.batch_size, lab.size.context_length, 64 if lab.tiny else 768
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    run: Callable[[Tensor], Any] = layer
    if isinstance(layer, Attention):  # a model makes its masks outside compiled code
        shared = Shared(range(shape[1]), masks=layer.make_masks(x, range(shape[1])))
        run = partial(layer, cache=None, shared=shared)

    def step() -> None:
        with torch.autocast(DEVICE.type, BF16, enabled=mixed):
            y = run(x)
        (y if isinstance(y, Tensor) else y[0]).float().square().mean().backward()

    figures = {"eager_ms": lab.time(step)["ms"]}
    if not lab.tiny:
        layer.compile(dynamic=False)
        figures["compiled_ms"] = lab.time(step)["ms"]
    return figures


def compare_layers(lab: Lab, name: str, backends: Sequence[str]) -> Cell:
    """Return a layer's time and error per backend; the first, in float64, is the reference."""
    shape = 2, 2, lab.size.context_length, 64 if lab.tiny else 768
    x, upstream = torch.randn(shape, device=DEVICE)
    figures, exact = Cell(), list[Tensor]()
    for backend in backends:
        torch.manual_seed(0)  # for equal weights
        cfg = lab.prepare(f"{name}:attn.backend={backend}").cfg
        layer, mixed = build_layer(cfg, {}, {}, 0).to(DEVICE), cfg.trainer.precision != "32-true"
        inputs = (x if exact else x.double()).clone().requires_grad_()
        layer = layer if exact else layer.double()
        with torch.autocast(DEVICE.type, BF16, enabled=mixed and bool(exact)):
            y = layer(inputs)
        results = [y, *torch.autograd.grad(y, inputs, upstream.to(y.dtype))]
        if exact:
            figures[f"{backend}_error"] = max(map(error_of, results, exact))
            times = time_layer(lab, layer, mixed)
            figures |= {f"{backend}_{how}": ms for how, ms in times.items()}
        exact = exact or results
    return figures


def time_fla(lab: Lab, name: str) -> Cell:
    """Return the time of fla's own layer."""
    if not ON_GPU:
        raise ConfigError("device", "fla needs a GPU")
    file, kind, more = OF_FLA[name]
    build = getattr(import_module(f"fla.layers.{file}"), kind)
    return time_layer(lab, build(hidden_size=768, num_heads=12, **more).to(DEVICE), mixed=True)


def time_decoding(lab: Lab, rows: str) -> Cell:
    """Return the time of decoding a token in `rows` rows, up to a full context, in bf16."""
    prepared, tokens = lab.prepare(MODES[1]), 4 if lab.tiny else 64
    seconds = [decode_tokens(prepared, int(rows), tokens) for _ in range(2)][-1]
    return {"tokens_per_s": int(rows) / seconds, "ms": 1e3 * seconds}


@dataclass(frozen=True)
class Item:
    """A function that measures a cell by its name, the names, and a time limit for all."""

    take: Callable[[Lab, str], Cell]
    cells: Sequence[str]
    seconds: int


MODES = ("mha:compile=true", "mha:compile=false")
IDS = ("", ":model.vocab_size=50257")
CHUNKS = ("", ":loss_chunk_tokens=4096", ":loss_chunk_tokens=16384")
HEADS = (MODES[1], *(MODES[0] + chunk for chunk in CHUNKS))
BY_FLEX = partial(compare_layers, backends=("reference", "flex", "sdpa"))
BY_FLA = partial(compare_layers, backends=("chunked", "fla", "chunked"))
WITH_SCORES = ("sliding", "mha+softcap", "mha+sink", "mha:position=alibi")
MECHANISMS = ("gqa", "mqa", *WITH_SCORES, "mla", "tpa", "differential")
UNDECIDED = ("mha+forget:position=none", "mha+softcap:position=alibi")
PEERS = (*LANGUAGE_MODELS, *(f"{name} compiled" for name in LANGUAGE_MODELS))
ROWS = ("", ":batch_size=32", ":batch_size=64")
ITEMS = {
    "device": Item(describe_device, ["rates"], 60),
    "profile": Item(profile_steps, MODES, 45),
    "head": Item(measure_head, [head + ids for ids in IDS for head in HEADS], 60),
    "step": Item(measure_step, [MODES[0] + IDS[1], *(m + n for n in ROWS for m in MODES)], 110),
    "run": Item(measure_run, ["log_every=10", "log_every=100"], 60),
    "peers": Item(measure_peer, PEERS, 150),
    "gradients": Item(compare_gradients, ["mha", "gqa"], 45),
    "mechanisms": Item(measure_step, [f"{name}:compile=true" for name in MECHANISMS], 150),
    "flex": Item(BY_FLEX, [*WITH_SCORES, *UNDECIDED, "sliding:trainer.precision=32-true"], 75),
    "fla": Item(BY_FLA, [*OF_FLA, "mamba2"], 60),
    "layers_of_fla": Item(time_fla, [*OF_FLA], 45),
    "decode": Item(time_decoding, ["1", "8", "64"], 60),
}
