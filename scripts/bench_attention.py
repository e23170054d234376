"""Times attention alone, forward and backward, against torch's module and a tutorial's classes.

`make bench-attention`, or in its environment: python scripts/bench_attention.py [--rounds 5]
    [--variants mha gqa+sink sliding] [--parts gate,sink] [--lengths 2048 16384]
Prints milliseconds, microseconds per token and ratios for inputs (B, T, 768) with 12 heads; one
line of JSON at the end. They are one layer's, the mean of two in a row where the second uses what
the first leaves. The peers, and `backend=reference`, hold all T x T scores, so they are left out
above T = 4,096.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from bench import Measure, interleave, quiet_threads, ratio, record, spread, timed
from contenders import Stack, add_choices, chosen, stack_of
from peers import ATTENTION_MODULES
from torch import nn

WIDTH, HEADS = 768, 12
TOKENS = 2048  # in a batch of short rows
LENGTHS = (256, 512, 1024, 2048, 4096)
OURS = (
    "mha",
    "mha:attn.backend=reference",
    "gqa:attn.num_kv_heads=4",
    "mqa",
    "mha_wrapper",
    "mha_wrapper:attn.out_proj=false",
)


def measure(build: Callable[[], nn.Module], batch: int, length: int, steps: int) -> float:
    """Return the seconds of one layer's forward and backward on an input (batch, length, WIDTH)."""
    module = build()
    layers = len(module) if isinstance(module, Stack) else 1
    x = torch.randn(batch, length, WIDTH, requires_grad=True)

    def step() -> None:
        module(x).sum().backward()

    return timed(step, warm_up=1, steps=steps) / layers


def contenders(
    names: list[str], peers: bool, lengths: list[int], steps: int
) -> dict[tuple[str, int], Measure]:
    """Return what measures each module at each length."""
    found: dict[tuple[str, int], Measure] = {}
    for length in lengths:
        batch = max(1, TOKENS // length)
        builders: dict[str, Callable[[], nn.Module]] = {
            f"gptattn {name}": partial(stack_of, name, length)
            for name in names
            if length <= LENGTHS[-1] or "backend=reference" not in name
        }
        if peers and length <= LENGTHS[-1]:
            sizes = {"num_heads": HEADS, "d_model": WIDTH, "context_length": length}
            builders |= {f"peer {n}": partial(b, **sizes) for n, b in ATTENTION_MODULES.items()}
        for name, build in builders.items():
            found[name, length] = partial(measure, build, batch, length, steps)
    return found


def bench(
    names: list[str],
    peers: bool,
    lengths: list[int],
    rounds: int,
    steps: int,
    file: Path | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Time all modules at all lengths; print and return milliseconds and ratios.

    The lengths are interleaved as the modules are: time per token is compared between them.
    """
    measures = contenders(names, peers, lengths, steps)
    seconds = interleave(measures, rounds, seed=0)
    first, shortest = f"gptattn {names[0]}", min(lengths)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for length in lengths:
        batch = max(1, TOKENS // length)
        print(f"\n(B, T) = ({batch}, {length}), {rounds} rounds of {steps}")
        print(f"{'':42} {'ms':>8} {'spread':>7} {f'/ {names[0]}':>8}", end=" ")
        print(f"{'us/token':>8} {f'/ T={shortest}':>8}")
        rows = result[str(length)] = {}
        at_length = {name: seconds[name, at] for name, at in measures if at == length}
        record(file, f"attention {length}", first, at_length)
        for name in [name for name, at in measures if at == length]:
            values = seconds[name, length]
            each = [value / (batch * length) for value in values]
            own = seconds.get((name, shortest), values)
            tokens = shortest * max(1, TOKENS // shortest)
            over, grown = ratio(values, seconds[first, length]), ratio(each, own) * tokens
            ms, us = 1e3 * median(values), 1e6 * median(each)
            print(f"{name:42} {ms:8.1f} {spread(values):7.1%} {over:8.2f} {us:8.1f} {grown:8.2f}")
            rows[name] = {"ms": ms, "over_first": over, "us_per_token": us, "over_shortest": grown}
    return result


def main() -> None:
    """Run the benchmark on each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_choices(parser, OURS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="T")
    parser.add_argument("--record", type=Path, metavar="FILE", help="for bench_check.py")
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    args = parser.parse_args()
    quiet_threads(args.threads)
    peers = not args.no_peers
    results = bench(chosen(args), peers, args.lengths, args.rounds, args.steps, args.record)
    print(json.dumps({"bench": "attention", "threads": args.threads, "results": results}))


if __name__ == "__main__":
    main()
