"""Times attention alone, forward and backward, against torch's module and a tutorial's classes.

`make bench`, or in its environment: python scripts/bench_attention.py [--rounds 5]
Prints milliseconds and ratios for inputs (B, T, 768) with 12 heads; one line of JSON at the end.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from bench import interleave, quiet_threads, ratio, spread, timed
from peers import ATTENTION_MODULES
from torch import nn

from gptattn.attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
)

WIDTH, HEADS = 768, 12
SHAPES = ((8, 256), (4, 512), (2, 1024), (1, 2048), (1, 4096))  # (B, T)
OURS: dict[str, Callable[..., nn.Module]] = {
    "wrapper, no projection": partial(MultiHeadAttentionWrapper, out_proj=False),
    "wrapper": MultiHeadAttentionWrapper,
    "mha": MultiHeadAttention,
    "mha, reference": partial(MultiHeadAttention, backend="reference"),
    "gqa, 4": partial(GroupedQueryAttention, num_kv_heads=4),
    "mqa": partial(GroupedQueryAttention, num_kv_heads=1),
}
BASELINE = "mha"


def measure(build: Callable[[], nn.Module], batch: int, length: int, steps: int) -> float:
    """Return the seconds of one forward and backward on an input (batch, length, WIDTH)."""
    module = build()
    x = torch.randn(batch, length, WIDTH, requires_grad=True)

    def step() -> None:
        module(x).sum().backward()

    return timed(step, warm_up=1, steps=steps)


def bench(batch: int, length: int, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Time all modules on one shape; print and return milliseconds, and ratios to BASELINE."""
    builders: dict[str, Callable[[], nn.Module]] = {
        f"gptattn {name}": partial(build, WIDTH, WIDTH, length, HEADS)
        for name, build in OURS.items()
    } | {
        f"peer {name}": partial(build, num_heads=HEADS, d_model=WIDTH, context_length=length)
        for name, build in ATTENTION_MODULES.items()
    }
    contenders = {
        name: partial(measure, build, batch, length, steps) for name, build in builders.items()
    }
    seconds = interleave(contenders, rounds, seed=length)
    mine = seconds[f"gptattn {BASELINE}"]
    print(f"\n(B, T) = ({batch}, {length}), {rounds} rounds of {steps}")
    print(f"{'':32} {'ms':>8} {'spread':>7} {'/ mha':>6}")
    result = {}
    for name, values in seconds.items():
        over = ratio(values, mine)
        print(f"{name:32} {1e3 * median(values):8.1f} {spread(values):7.1%} {over:6.2f}")
        result[name] = {"ms": round(1e3 * median(values), 2), "over_mha": round(over, 3)}
    return result


def main() -> None:
    """Run the benchmark on each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[T for _, T in SHAPES])
    args = parser.parse_args()
    quiet_threads(args.threads)
    results = {
        f"{B}x{T}": bench(B, T, args.rounds, args.steps) for B, T in SHAPES if T in args.lengths
    }
    print(json.dumps({"bench": "attention", "threads": args.threads, "results": results}))


if __name__ == "__main__":
    main()
