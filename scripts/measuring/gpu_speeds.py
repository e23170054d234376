"""The GPU's parts `train`, `loop` and `decode`: what steps, runs and tokens cost."""

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.decode.generate import stream
from gptattn.decode.sampling import Sampling
from gptattn.model.cost import measure_cost
from gptattn.model.gpt import GPT
from gptattn.training.module import LanguageModel
from gptattn.training.run import train
from measuring.gpu_lab import Cell, Lab, Step, training_step
from measuring.peers import Sizes, build_transformers

T, VOCABULARIES, ROWS = 1024, (50257, 50304), (16, 32, 64)


def tokens_per_s(lab: Lab, step: Step, rows: int, vocab: int) -> Cell:
    """Time steps on rows of T tokens."""
    rows, tokens = lab.size(rows, 2), lab.size(T, 16)
    batch = lab.batch(rows, tokens, vocab)
    step(*batch)  # compiles, and makes the optimizer's averages
    peak = lab.peak_bytes(lambda: step(*batch))
    seconds = lab.seconds(lambda: step(*batch), warm_up=5)
    return {"tokens_per_s": rows * tokens / seconds, "ms": 1e3 * seconds, "step_mb": peak / 1e6}


def ours(lab: Lab, compiled: bool, vocab: int, rows: int, attn: str = "mha") -> Cell:
    """Our model in a bare loop; `of_rate` is the share of the measured rate of products."""
    rate = lab.rate(lab.half)
    torch._dynamo.reset()
    model = lab.model(f"attn={attn}", vocab_size=vocab)
    flops = measure_cost(model).flops_per_token
    for block in model.layers() if compiled else []:
        lab.compile(block)
    cell = tokens_per_s(lab, training_step(lab, model, model.loss), rows, vocab)
    return cell | {"of_rate": cell["tokens_per_s"] * flops / rate}


def peer(lab: Lab, compiled: bool, rows: int) -> Cell:
    """transformers' GPT-2, all logits at once, at the vocabulary of 50,304."""
    torch._dynamo.reset()
    cfg = lab.settings().model
    shape = cfg.num_layers, cfg.num_heads, cfg.d_model, cfg.context_length
    model = build_transformers(Sizes(*shape, lab.size(50304, 64))).to(lab.device)
    if compiled:
        lab.compile(model)

    def loss_of(ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    return tokens_per_s(lab, training_step(lab, model, loss_of), rows, 50304)


def train_cells() -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of the part `train` by name, those of the goals first."""
    grid = [(c, v, rows) for rows in ROWS for c in (True, False) for v in VOCABULARIES]
    found: dict[str, Callable[[Lab], Cell]] = {}
    for compiled, vocab, rows in grid:
        how = "compiled" if compiled else "eager"
        name = f"{how}, V = {vocab:,}, {rows} rows"
        found[name] = partial(ours, compiled=compiled, vocab=vocab, rows=rows)
        if vocab == VOCABULARIES[-1]:
            found[f"transformers, {how}, {rows} rows"] = partial(peer, compiled=compiled, rows=rows)
    for attn in ("gqa", "mqa"):
        found[f"{attn}, compiled, V = 50,304, 16 rows"] = partial(
            ours, compiled=True, vocab=50304, rows=16, attn=attn
        )
    return found


def loop_cells() -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of the part `loop` by name."""
    return {
        "train.py, eager": partial(against_events, compiled=False),
        "train.py, compiled": partial(against_events, compiled=True),
    }


def against_events(lab: Lab, compiled: bool) -> Cell:
    """A run's own figures beside events around its steps; in steps 3 to 5 waiting is an error."""
    marks: list[torch.cuda.Event] = []
    peak: list[float] = []

    def look(module: LanguageModel, *_: Any) -> None:
        if not lab.on_gpu:
            return
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        # Compiling may wait, so this is asked of the eager run.
        forbidden = not compiled and 3 <= module.global_step + 1 <= 5
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
        peak[:] = [torch.cuda.max_memory_allocated() / 1e6]

    with tempfile.TemporaryDirectory() as folder:
        cfg = lab.settings(
            f"cache_dir={folder}/cache",
            f"budget.steps={lab.size(300, 6)}",
            f"batch_size={lab.size(16, 4)}",
            f"model.vocab_size={lab.size(50304, 256)}",
            f"trainer.threads={lab.size(8, 1)}",
            f"compile={'true' if compiled and not lab.tiny else 'false'}",
            "validation.count=1",
            "sample.tokens=0",
            "checkpoint=false",
            "log_every=10000",
        )
        with mock.patch.object(LanguageModel, "on_train_batch_end", look):
            metrics = train(cfg, Path(folder) / "run")["metrics"]
    cell = {name: metrics[f"perf/{name}"] for name in ("tokens_per_s", "step_ms", "mfu")}
    cell["peak_mb"] = metrics["perf/peak_memory_training_mb"]
    if not lab.on_gpu:
        return cell
    torch.cuda.synchronize()
    events = median(first.elapsed_time(last) for first, last in pairwise(marks[5:]))
    off = metrics["perf/step_ms"] / events - 1
    # The run's validation, which has no gradients, comes after the newest look.
    right_peak = abs(cell["peak_mb"] / peak[0] - 1) < 0.02
    return cell | {"clock_off": off, "ok": abs(off) < 0.02 and right_peak}


def decode(lab: Lab, batch: int) -> Cell:
    """Tokens after a prompt of 512, one by one, and the slowest of them."""
    model = lab.model().to(lab.half).eval()
    ids, _ = lab.batch(batch, lab.size(512, 8))
    steps = stream(model, ids, lab.size(200, 6), Sampling(temperature=0))
    next(steps)
    times = [lab.seconds(lambda: next(steps), 0, 1) for _ in range(lab.size(150, 2))]
    times = sorted(times[lab.size(10, 0) :])
    middle = times[len(times) // 2]
    return {
        "tokens_per_s": batch / middle,
        "slowest_of_median": times[-1] / middle,
        "ok": times[-1] < 5 * middle or lab.tiny,
    }


def same_text(lab: Lab) -> Cell:
    """Greedy ids in float32: with a cache, without, and beside a longer prompt."""
    model: GPT = lab.model().eval()
    new = lab.size(24, 4)
    ids, _ = lab.batch(1, lab.size(64, 6))
    greedy = Sampling(temperature=0)
    cached = torch.cat([ids, *stream(model, ids, new, greedy)], dim=1)
    plainly = ids
    with torch.inference_mode():
        for _ in range(new):
            plainly = torch.cat([plainly, model(plainly)[:, -1:].argmax(-1)], dim=1)
    longer, _ = lab.batch(1, ids.shape[1] + 3)
    padded = torch.cat([ids[:, :1].expand(-1, 3), ids], dim=1)
    both, pads = torch.cat([padded, longer]), torch.tensor([3, 0], device=lab.device)
    beside = torch.cat([both, *stream(model, both, new, greedy, padding=pads)], dim=1)[:1, 3:]
    uncached, alone = torch.equal(cached, plainly), torch.equal(cached, beside)
    return {"as_without_a_cache": uncached, "as_padded": alone, "ok": uncached and alone}


def decode_cells() -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of the part `decode` by name."""
    found: dict[str, Callable[[Lab], Cell]] = {"the same text by every way": same_text}
    for batch in (1, 8, 64):
        found[f"batch {batch}, eager"] = partial(decode, batch=batch)
    return found
