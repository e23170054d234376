"""The GPU's part `train`: what steps cost."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.model.cost import measure_cost
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
