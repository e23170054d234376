"""`python -m gptattn.sweep.trial`: computes the work of runs and times steps of the heaviest.

Reads from stdin, as JSON, a list of runs' settings and one of ways to share the machine. Prints, as
JSON, the FLOPs and the fixed seconds of each run, and for each way the FLOPs per second of training
steps, of all processes together. Started by `gptattn.sweep.estimate`.
"""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch

from gptattn.machine.device import resolve_device, set_threads, synchronize
from gptattn.model.cost import measure_cost
from gptattn.settings.budget import resolve_budget
from gptattn.settings.build import build_data, build_model
from gptattn.settings.config import TrainConfig
from gptattn.settings.values import typed
from gptattn.sweep.sharing import Share
from gptattn.training.precision import autocast

LIMIT_SECONDS = 60
TRIAL_SECONDS = 1.0
TRIAL_TOKENS = 2048


def main() -> None:
    """Read the settings from stdin and print the answer as the last line of stdout."""
    settings, ways = json.load(sys.stdin)
    cfgs = [typed(TrainConfig, node) for node in settings]
    # The system ends a trial that hangs, even if the sweep is gone.
    signal.alarm(LIMIT_SECONDS)
    work = [_flops_and_seconds(cfg) for cfg in cfgs]
    (flops, _), heaviest = max(zip(work, cfgs, strict=True), key=lambda pair: pair[0][0])
    rates = [_together(heaviest, Share(**way)) if flops else 1.0 for way in ways]
    print("\n" + json.dumps({"work": work, "rates": rates}))


def _together(cfg: TrainConfig, share: Share) -> float:
    """Return the FLOPs per second of all processes, where so many train at once."""
    if resolve_device(cfg.trainer.accelerator).type != "cpu" or sys.platform != "linux":
        return share.jobs * _flops_per_second(cfg, share.threads)
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
    return sum(ours.recv() for ours in answers)


def _report(cfg: TrainConfig, threads: int | None, begin: Barrier, answer: Connection) -> None:
    answer.send(_flops_per_second(cfg, threads, lambda: begin.wait(LIMIT_SECONDS)))


def _flops_and_seconds(cfg: TrainConfig) -> tuple[float, float]:
    """Return the FLOPs that the run needs, and the seconds of a budget in seconds (else 0)."""
    data = build_data(cfg)
    with torch.device("meta"):
        flops_per_token = measure_cost(build_model(cfg, data.tokenizer.vocab_size)).flops_per_token
    tokens_per_step = cfg.batch_size * cfg.model.context_length
    budget = resolve_budget(cfg.budget, tokens_per_step, flops_per_token)
    # `flops_per_token` is that of training; forward alone is a third of it.
    validations = 1 if budget.steps == 0 else cfg.validation.count
    flops = validations * len(data.val) * flops_per_token / 3
    if budget.steps is None:
        assert budget.seconds is not None
        return flops, budget.seconds
    return flops + budget.steps * tokens_per_step * flops_per_token, 0.0


def _flops_per_second(
    cfg: TrainConfig, threads: int | None, warm: Callable[[], object] = lambda: None
) -> float:
    """Measure the FLOPs per second of a training step of this model (without the optimizer).

    `warm` is called after the first step, which is not measured.
    """
    device = resolve_device(cfg.trainer.accelerator)
    set_threads(cfg.trainer.threads or threads)
    with device:
        model = build_model(cfg, vocab_size=256)
    T = cfg.model.context_length
    rows = max(1, min(cfg.batch_size // cfg.accumulate, TRIAL_TOKENS // T))
    ids = torch.zeros(rows, T, dtype=torch.long, device=device)
    steps, start = 0, 0.0
    while steps < 2 or time.perf_counter() - start < TRIAL_SECONDS:
        if steps == 1:  # the first one warms up
            synchronize(device)
            warm()
            start = time.perf_counter()
        with autocast(cfg.trainer.precision, device):
            loss = model.loss(ids, ids, cfg.loss_chunk_tokens)
        loss.backward()
        steps += 1
    synchronize(device)
    seconds = (time.perf_counter() - start) / (steps - 1)
    return measure_cost(model).flops_per_token * ids.numel() / seconds


if __name__ == "__main__":
    main()
