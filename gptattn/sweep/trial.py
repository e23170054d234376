"""`python -m gptattn.sweep.trial`: computes the work of runs and times steps of the heaviest.

Reads a JSON list of runs' settings from stdin. Prints, as JSON, the FLOPs and the fixed seconds of
each run, and the FLOPs per second of a training step. Started by `gptattn.sweep.estimate`.
"""

import json
import signal
import sys
import time

import torch

from gptattn.machine.device import resolve_device, set_threads, synchronize
from gptattn.model.cost import measure_cost
from gptattn.settings.budget import resolve_budget
from gptattn.settings.build import build_data, build_model
from gptattn.settings.config import TrainConfig
from gptattn.settings.values import typed
from gptattn.sweep.plan import threads_each
from gptattn.training.precision import autocast

LIMIT_SECONDS = 60
TRIAL_SECONDS = 1.0
TRIAL_TOKENS = 2048


def main() -> None:
    """Read the settings from stdin and print the answer as the last line of stdout."""
    cfgs = [typed(TrainConfig, node) for node in json.load(sys.stdin)]
    # The system ends a trial that hangs, even if the sweep is gone.
    signal.alarm(LIMIT_SECONDS)
    work = [_flops_and_seconds(cfg) for cfg in cfgs]
    (flops, _), heaviest = max(zip(work, cfgs, strict=True), key=lambda pair: pair[0][0])
    rate = _flops_per_second(heaviest) if flops else 1.0
    print("\n" + json.dumps({"work": work, "rate": rate}))


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


def _flops_per_second(cfg: TrainConfig) -> float:
    """Measure the FLOPs per second of a training step of this model (without the optimizer)."""
    device = resolve_device(cfg.trainer.accelerator)
    set_threads(cfg.trainer.threads or threads_each(cfg))
    with device:
        model = build_model(cfg, vocab_size=256)
    T = cfg.model.context_length
    rows = max(1, min(cfg.batch_size // cfg.accumulate, TRIAL_TOKENS // T))
    ids = torch.zeros(rows, T, dtype=torch.long, device=device)
    steps, start = 0, 0.0
    while steps < 2 or time.perf_counter() - start < TRIAL_SECONDS:
        if steps == 1:  # the first one warms up
            synchronize(device)
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
