"""How long runs will take: a few real steps of one of them, and arithmetic for the others."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from gptattn.budget import resolve_budget
from gptattn.build import build_data, build_model
from gptattn.config import TrainConfig
from gptattn.cost import measure_cost
from gptattn.device import resolve_device, set_threads, synchronize
from gptattn.sweep.plan import threads_each

STARTUP_SECONDS = 7.0  # imports, the device's matmul rate, the record's end
TRIAL_SECONDS = 1.0
TRIAL_TOKENS = 2048


def expected_seconds(cfgs: Sequence[TrainConfig]) -> list[float]:
    """Rough seconds of each run, alone on the machine. `cfgs` have been checked."""
    work = {_no_seed(cfg): (0.0, 0.0) for cfg in cfgs}
    for cfg in cfgs:
        key = _no_seed(cfg)
        if work[key] == (0.0, 0.0):
            work[key] = _flops_and_seconds(cfg)
    heaviest = max(cfgs, key=lambda cfg: work[_no_seed(cfg)][0])
    rate = _flops_per_second(heaviest) if work[_no_seed(heaviest)][0] else 1.0
    expected = []
    for cfg in cfgs:
        flops, seconds = work[_no_seed(cfg)]
        expected.append(STARTUP_SECONDS + seconds + flops / rate)
    return expected


def _no_seed(cfg: TrainConfig) -> str:
    # Whose weights a run starts from makes it no longer.
    return repr(replace(cfg, seed=0, init_from=None))


def _flops_and_seconds(cfg: TrainConfig) -> tuple[float, float]:
    """FLOPs that the device has to do, and seconds that are given."""
    data = build_data(cfg)
    with torch.device("meta"):
        flops_per_token = measure_cost(build_model(cfg, data.tokenizer.vocab_size)).flops_per_token
    tokens_per_step = cfg.batch_size * cfg.model.context_length
    budget = resolve_budget(cfg.budget, tokens_per_step, flops_per_token)
    # Forward alone is a third of a training step's work.
    validations = 1 if budget.steps == 0 else cfg.validation.count
    flops = validations * len(data.val) * flops_per_token / 3
    if budget.steps is None:
        assert budget.seconds is not None
        return flops, budget.seconds
    return flops + budget.steps * tokens_per_step * flops_per_token, 0.0


def _flops_per_second(cfg: TrainConfig) -> float:
    """What a training step of this model gets out of the device."""
    device = resolve_device(cfg.trainer.accelerator)
    before = torch.get_num_threads()
    set_threads(cfg.trainer.threads or threads_each(cfg))
    try:
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
            model.loss(ids, ids, cfg.loss_chunk_tokens).backward()
            steps += 1
        synchronize(device)
        seconds = (time.perf_counter() - start) / (steps - 1)
        return measure_cost(model).flops_per_token * ids.numel() / seconds
    finally:
        torch.set_num_threads(before)
