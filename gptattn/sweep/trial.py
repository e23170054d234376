"""`python -m gptattn.sweep.trial`: computes the work of runs and times steps of the heaviest.

Reads from stdin, as JSON, a list of runs' settings and one of ways to share the machine. Prints, as
JSON, the FLOPs and the fixed seconds of each run, and for each way the FLOPs per second of training
steps, of all processes together, or null if there is too little memory. Started by
`gptattn.sweep.estimate`.
"""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch

from gptattn.machine.arithmetic import matmul_precision
from gptattn.machine.device import (
    available_memory_bytes,
    peak_memory_mb,
    reset_peak_memory,
    resolve_device,
    set_threads,
    synchronize,
)
from gptattn.model.cost import measure_cost
from gptattn.settings.budget import resolve_budget
from gptattn.settings.build import build_data, build_model
from gptattn.settings.config import TrainConfig
from gptattn.settings.values import typed
from gptattn.sweep.fork_server import can_fork
from gptattn.sweep.sharing import Share
from gptattn.training.precision import autocast

LIMIT_SECONDS = 60
TRIAL_SECONDS = 1.0
TRIAL_TOKENS = 2048
WEIGHT_BYTES = 8  # per parameter, of weight and gradient in float32


def main() -> None:
    """Read the settings from stdin and print the answer as the last line of stdout."""
    settings, ways = json.load(sys.stdin)
    cfgs = [typed(TrainConfig, node) for node in settings]
    # The system ends a trial that hangs, even if the sweep is gone.
    signal.alarm(LIMIT_SECONDS)
    work = [_flops_and_seconds(cfg) for cfg in cfgs]
    (flops, _), heaviest = max(zip(work, cfgs, strict=True), key=lambda pair: pair[0][0])
    with matmul_precision(heaviest.trainer.matmul_precision):  # the copies keep it
        rates = _rates(heaviest, [Share(**way) for way in ways]) if flops else [1.0] * len(ways)
    print("\n" + json.dumps({"work": work, "rates": rates}))


def _rates(cfg: TrainConfig, shares: Sequence[Share]) -> list[float | None]:
    """Return the FLOPs per second with each share; None where so many runs do not fit in memory.

    How much memory a run needs is measured with the first share, which is always tried.
    """
    rates: list[float | None] = []
    needs = 0.0
    for share in shares:
        if share.jobs * needs > available_memory_bytes():
            rates.append(None)
            continue
        rate, needs = _together(cfg, share)
        rates.append(rate)
    return rates


def _together(cfg: TrainConfig, share: Share) -> tuple[float, float]:
    """Return the FLOPs per second of all processes, where so many train at once, and the bytes of
    memory that a run needs.
    """
    on_cpu = resolve_device(cfg.trainer.accelerator).type == "cpu"
    if not on_cpu or not can_fork():
        rate, needs = _measured(cfg, share.threads)
        # Not measured: on a GPU runs take turns, on a CPU each has its own cores.
        return rate * (share.jobs if on_cpu else 1), needs
    # Copies of this process, which itself never starts threads.
    copies = multiprocessing.get_context("fork")
    begin, answers = copies.Barrier(share.jobs), []
    for _ in range(share.jobs):
        ours, theirs = copies.Pipe(duplex=False)
        copies.Process(
            target=_report, args=(cfg, share.threads, begin, theirs), daemon=True
        ).start()
        theirs.close()  # so that the copy's death ends the waiting for its answer
        answers.append(ours)
    rates, needs = zip(*(ours.recv() for ours in answers), strict=True)
    return sum(rates), max(needs)


def _report(cfg: TrainConfig, threads: int | None, begin: Barrier, answer: Connection) -> None:
    signal.alarm(LIMIT_SECONDS)  # a copy does not inherit it
    answer.send(_measured(cfg, threads, lambda: begin.wait(LIMIT_SECONDS)))


def _flops_and_seconds(cfg: TrainConfig) -> tuple[float, float]:
    """Return the FLOPs that the run needs, and the seconds of a budget in seconds (else 0)."""
    data = build_data(cfg)
    with torch.device("meta"):
        model = build_model(cfg, data.tokenizer.vocab_size)
    flops_per_token = measure_cost(model, data.scored).flops_per_token
    tokens_per_step = cfg.batch_size * cfg.model.context_length
    budget = resolve_budget(cfg.budget, tokens_per_step, flops_per_token)
    # `flops_per_token` is that of training; forward alone is a third of it.
    validations = 1 if budget.steps == 0 else cfg.validation.count
    flops = validations * data.val_tokens * flops_per_token / 3
    if budget.steps is None:
        assert budget.seconds is not None
        return flops, budget.seconds
    return flops + budget.steps * tokens_per_step * flops_per_token, 0.0


def _measured(
    cfg: TrainConfig, threads: int | None, warm: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Measure the FLOPs per second of a training step of this model (without the optimizer), and
    the bytes of memory that a run needs, in addition to this process.

    `warm` is called after the first step, which is not measured.
    """
    device = resolve_device(cfg.trainer.accelerator)
    set_threads(cfg.trainer.threads or threads)
    reset_peak_memory(device)
    before = peak_memory_mb(device)
    with device:
        model = build_model(cfg, vocab_size=256)
    T = cfg.model.context_length
    tokens = cfg.batch_size // cfg.accumulate * T
    rows = max(1, min(tokens, TRIAL_TOKENS) // T)
    ids = torch.zeros(rows, T, dtype=torch.long, device=device)
    steps, start = 0, 0.0
    while steps < 2 or time.perf_counter() - start < TRIAL_SECONDS:
        if steps == 1:  # the first one warms up
            synchronize(device)
            warm()
            start = time.perf_counter()
        with autocast(cfg.trainer.precision, device):
            loss = model.loss(ids, ids, chunk_tokens=cfg.loss_chunk_tokens)
        loss.backward()
        steps += 1
    synchronize(device)
    seconds = (time.perf_counter() - start) / (steps - 1)
    cost = measure_cost(model)
    taken = 1e6 * (peak_memory_mb(device) - before)
    # The trial has weights and gradients; a run has AdamW's two averages too, and all its tokens.
    activations = max(0.0, taken - WEIGHT_BYTES * cost.params) * tokens / ids.numel()
    needs = 2 * WEIGHT_BYTES * cost.params + activations
    return cost.flops_per_token * ids.numel() / seconds, needs


if __name__ == "__main__":
    main()
