"""One attention layer, forward and backward, against torch's module and a tutorial's classes.

Inputs are (B, T, 768) with 12 heads. Prints milliseconds, microseconds per token and ratios for one
layer. Where a second layer reuses the first one's state, it prints the mean of the two. Above
T = 4,096 the peers and `backend=reference` are left out, because they hold all T x T scores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from gptattn.cli.arguments import Count, option, parse
from gptattn.training.speed import Turn, interleave
from measuring.menu import PEERS, VARIANTS, Stack, check_peers, check_variants, stack_of
from measuring.peers import ATTENTION_MODULES
from measuring.tables import print_table, ratio, set_threads, spread, timed

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


@dataclass(frozen=True)
class Arguments:
    """variants=[mha,gqa+sink] peers=[]"""

    variants: tuple[str, ...] = option(VARIANTS, OURS)
    peers: tuple[str, ...] = option(PEERS, tuple(ATTENTION_MODULES))
    lengths: tuple[int, ...] = option("tokens per row", LENGTHS)
    rounds: Count = option("turns of each contender", 7)
    steps: Count = option("steps per turn", 2)
    threads: Count = option("CPU threads", 2)


def measure(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Time all modules at all lengths; print and return milliseconds and ratios.

    Lengths take turns too, because time per token is compared between them.
    """
    args = parse(Arguments, arguments)
    set_threads(args.threads)
    names, peers = check_variants(args.variants), check_peers(args.peers, ATTENTION_MODULES)
    measures = contenders(names, peers, args.lengths, args.steps)
    seconds = interleave(measures, args.rounds)
    first, shortest = f"gptattn {names[0]}", min(args.lengths)
    results: dict[str, Any] = {}
    for length in args.lengths:
        batch, rows = max(1, TOKENS // length), []
        for name in (name for name, at in measures if at == length):
            values = seconds[name, length]
            per_token = [value / (batch * length) for value in values]
            tokens = shortest * max(1, TOKENS // shortest)
            shortest_per_token = [value / tokens for value in seconds[name, shortest]]
            figures = {
                "ms": 1e3 * median(values),
                "spread": spread(values),
                "over_first": ratio(values, seconds[first, length]),
                "us_per_token": 1e6 * median(per_token),
                "over_shortest": ratio(per_token, shortest_per_token),
            }
            results[f"{name} T={length}"] = figures
            form = "{ms:.1f} {spread:.1%} {over_first:.2f} {us_per_token:.1f} {over_shortest:.2f}"
            rows.append([name, *form.format(**figures).split()])
        title = f"(B, T) = ({batch}, {length}), {args.rounds} rounds of {args.steps}"
        headings = ["", "ms", "spread", f"/ {names[0]}", "us/token", f"/ T={shortest}"]
        print_table(title, headings, rows)
    return {"threads": args.threads, "results": results}, 0


def contenders(
    names: list[str], peers: list[str], lengths: Sequence[int], steps: int
) -> dict[tuple[str, int], Turn]:
    """Return a turn for each module at each length."""
    turns: dict[tuple[str, int], Turn] = {}
    for length in lengths:
        builders: dict[str, Callable[[], nn.Module]] = {
            f"gptattn {name}": partial(stack_of, name, length)
            for name in names
            if length <= LENGTHS[-1] or "backend=reference" not in name
        }
        if length <= LENGTHS[-1]:
            for name in peers:
                builders[f"peer {name}"] = partial(ATTENTION_MODULES[name], WIDTH, HEADS, length)
        for name, build in builders.items():
            turns[name, length] = partial(layer_seconds, build, length, steps)
    return turns


def layer_seconds(build: Callable[[], nn.Module], length: int, steps: int) -> float:
    """Return one layer's seconds, forward and backward, on TOKENS tokens or one longer row."""
    module = build()
    layers = len(module) if isinstance(module, Stack) else 1
    x = torch.randn(max(1, TOKENS // length), length, WIDTH, requires_grad=True)
    return timed(lambda: module(x).sum().backward(), warm_up=1, steps=steps) / layers
