"""Shows where the time of a training step goes, by torch's profiler, on a CPU.

python scripts/profile_step.py model=gpt2_small batch_size=2 trainer.precision=bf16-mixed
Takes the settings of train.py, trains a few steps on random tokens, and prints the share of each
kind of operation. Operations that hold others count without them. The profiler itself takes time,
most where operations are small.
"""

import re
import sys
from collections.abc import Callable

import torch
from bench import timed
from contenders import CHOICES, autocast
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gptattn.errors import ConfigError, UserError
from gptattn.machine.device import matmul_flops_per_second, set_threads
from gptattn.model.cost import measure_cost
from gptattn.settings.build import build_data, build_matrix_rule, build_model
from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig
from gptattn.training.module import LanguageModel
from gptattn.training.preflight import DTYPES, preflight

CPU = torch.device("cpu")
STEPS = 3
# The first pattern that is found in an operation's name says its kind.
KINDS = {
    "attention": "scaled_dot_product|flash_attention",
    "optimizer and clipping": "adam|foreach|vector_norm|lerp",
    "loss": r"softmax|logsumexp|nll|gather|scatter|exp\b|exp_",
    "norms": "norm",
    "activation": "gelu|silu|relu",
    "products": "mm|linear|matmul|convolution",
    "casts and copies": "copy|cat|clone",
    "sums and elementwise": "add|mul|sum|sub|div|fill|zero",
}


def kind_of(operation: str) -> str:
    """Return the kind of an operation, such as `aten::addmm`."""
    found = (k for k, names in KINDS.items() if re.search(names, operation, re.IGNORECASE))
    return next(found, "other")


def new_step(cfg: TrainConfig) -> tuple[Callable[[], None], float]:
    """Return a step on random tokens, of one micro-batch, and its FLOPs."""
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, cfg.model.vocab_size or build_data(cfg).tokenizer.vocab_size)
    module = LanguageModel(
        model,
        cfg.optim,
        lambda step: 0.0,
        accumulate=1,
        loss_chunk_tokens=cfg.loss_chunk_tokens,
        val_bytes=1,
        matrices=build_matrix_rule(cfg),
    )
    optimizer = module.configure_optimizers()
    rows = cfg.batch_size // cfg.accumulate
    ids = torch.randint(len(model.head.weight), (rows, cfg.model.context_length))

    def step() -> None:
        with autocast(cfg.trainer.precision, CPU):
            loss = model.loss(ids, ids, chunk_tokens=cfg.loss_chunk_tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step, ids.numel() * measure_cost(model).flops_per_token


def shares(step: Callable[[], None]) -> dict[str, float]:
    """Return the share of each kind of operation in the time of a few steps."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
    taken = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in found.key_averages():
        taken[kind_of(event.key)] += event.self_cpu_time_total
    whole = sum(taken.values())
    return {kind: own / whole for kind, own in taken.items()}


def main() -> None:
    """Print the time of a step, and the share of each kind of operation, the largest first."""
    try:
        cfg = preflight(settings(["trainer=cpu", *sys.argv[1:]])).cfg
        trainer = cfg.trainer
        if trainer.precision not in CHOICES:
            raise ConfigError("trainer.precision", f"{trainer.precision}; give one of {CHOICES}")
    except UserError as error:
        sys.exit(f"error: {error}")
    set_threads(trainer.threads)
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    step, flops = new_step(cfg)
    seconds = timed(step, warm_up=1, steps=STEPS)
    rate = matmul_flops_per_second(CPU, DTYPES[trainer.precision])
    found = shares(step)
    print(f"{1e3 * seconds:,.0f} ms a step, {flops / seconds / rate:.2f} of the rate of products")
    for kind, share in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"{kind:24} {share:6.1%}")


if __name__ == "__main__":
    main()
