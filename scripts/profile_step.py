"""Shows where the time of a training step goes, by torch's profiler, on a CPU.

python scripts/profile_step.py model=gpt2_small batch_size=2 trainer.precision=bf16-mixed
Takes the settings of train.py, trains a few steps on random tokens, and prints the share of each kind
of operation. Operations that hold others count without them. The profiler itself takes time, most
where operations are small.
"""

import re
import sys
import time

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gptattn.cli.main import check_job
from gptattn.errors import UserError
from gptattn.machine.arithmetic import computing
from gptattn.machine.device import matmul_flops_per_second
from gptattn.model.cost import measure_cost
from gptattn.settings.build import build_data, build_model
from gptattn.settings.config import TrainConfig
from gptattn.training.module import LanguageModel
from gptattn.training.precheck import DTYPES
from gptattn.training.precision import autocast

CPU = torch.device("cpu")
STEPS = 3
# The first pattern that is found in an operation's name says its kind.
KINDS = {
    "attention": "scaled_dot_product|flash_attention",
    "optimizer and clipping": "adam|foreach|vector_norm|lerp",
    "loss": "softmax|logsumexp|nll|gather|scatter|exp",
    "norms": "norm",
    "activation": "gelu|silu|relu",
    "products": "mm|linear|matmul|convolution",
    "casts and copies": "copy|cat|clone",
    "sums and elementwise": "add|mul|sum|sub|div|fill|zero",
}


def kind_of(operation: str) -> str:
    """Return the kind of an operation, such as `aten::addmm`."""
    return next((kind for kind, found in KINDS.items() if re.search(found, operation)), "other")


def shares(cfg: TrainConfig) -> dict[str, float]:
    """Train a few steps with the profiler, and print their rate; return the share of each kind."""
    vocab = cfg.model.vocab_size or build_data(cfg).tokenizer.vocab_size
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, vocab)
    module = LanguageModel(
        model, cfg.optim, lambda step: 0.0, accumulate=1, loss_chunk_tokens=None, val_bytes=1
    )
    optimizer = module.configure_optimizers()
    ids = torch.randint(vocab, (cfg.batch_size, cfg.model.context_length))

    def step() -> None:
        with autocast(cfg.trainer.precision, CPU):
            loss = model.loss(ids, ids, cfg.loss_chunk_tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    step()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    seconds = (time.perf_counter() - start) / STEPS
    rate = matmul_flops_per_second(CPU, DTYPES[cfg.trainer.precision])
    reached = ids.numel() * measure_cost(model).flops_per_token / seconds / rate
    print(f"{ids.numel() / seconds:,.0f} tokens/s, {reached:.2f} of the rate of products", end=" ")
    print(f"({rate / 1e9:,.0f} GFLOP/s)")
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
    taken = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in found.key_averages():
        taken[kind_of(event.key)] += event.self_cpu_time_total
    whole = sum(taken.values())
    return {kind: own / whole for kind, own in taken.items()}


def main() -> None:
    """Print the share of each kind of operation, the largest first."""
    try:
        cfg = check_job(["trainer=cpu", *sys.argv[1:]])
    except UserError as error:
        sys.exit(str(error))
    trainer = cfg.trainer
    with computing(trainer.threads, trainer.matmul_precision, trainer.deterministic, CPU):
        found = shares(cfg)
    for kind, share in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"{kind:24} {share:6.1%}")


if __name__ == "__main__":
    main()
