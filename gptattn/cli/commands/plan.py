"""Works out what training a model on GPUs would take: `gptattn-plan model=gpt2_small`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.table import Table

from gptattn.cli.arguments import Names, parse
from gptattn.cli.compose import settings
from gptattn.cli.script import run_script
from gptattn.errors import ConfigError
from gptattn.machine.console import make_console, span
from gptattn.model.cost import measure_cost, parameter_count
from gptattn.model.scale import Machine, activation_bytes, plan
from gptattn.settings.build import build_model
from gptattn.settings.values import within

HELP = """\
COMMAND model=gpt2_small vocab=50304 machines=[1x1,1x8,64x8]

  tokens=1e10       training tokens
  batch=524288      tokens per optimizer step, of all GPUs together
  rows=16           the most rows of the context on a GPU at a time
  vocab=50304       ids of the tokenizer
  machines=[1x1,1x8,64x8]
                    nodes x GPUs in each
  tflops=989 mfu=0.4 memory=80 link=450 network=50
                    of a GPU: its peak in 10^12 FLOPs per second, the share of it
                    that training reaches, its memory in GB, and GB per second to
                    the others of its node, and to other nodes; an H100's
  precision=bf16    or float32, of what is kept for the backward pass

All other settings are those of training.
"""
MACHINES = Names("1x1,1x8,64x8")
OWN = re.compile(r"(tokens|batch|rows|vocab|machines|tflops|mfu|memory|link|network|precision)=")


@dataclass(frozen=True)
class Arguments:
    """The command's own arguments; HELP describes them."""

    tokens: float = field(default=1e10, metadata=within(above=0))
    batch: int = field(default=524_288, metadata=within(least=1))
    rows: int = field(default=16, metadata=within(least=1))
    vocab: int = field(default=50_304, metadata=within(least=1, most=2**30))
    machines: Names = MACHINES
    tflops: float = field(default=989.0, metadata=within(above=0))
    mfu: float = field(default=0.4, metadata=within(above=0, most=1))
    memory: float = field(default=80.0, metadata=within(above=0))
    link: float = field(default=450.0, metadata=within(above=0))
    network: float = field(default=50.0, metadata=within(above=0))
    precision: str = "bf16"


def main() -> int:
    """Run `gptattn-plan`; return the exit code."""
    return run_script(HELP, run)


def run(arguments: Sequence[str]) -> None:
    """Print a row for each number of machines. Raises ConfigError, which names the argument."""
    own = [argument for argument in arguments if OWN.match(argument)]
    args = parse(Arguments, own)
    cfg = settings([argument for argument in arguments if argument not in own])
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}.get(args.precision)
    if dtype is None:
        raise ConfigError("precision", f"{args.precision} is not known; give bf16 or float32")
    model = build_model(cfg, args.vocab)
    cost = measure_cost(model)
    console = make_console()
    console.print(
        f"{parameter_count(model):,} parameters, {cost.flops_per_token / 1e6:,.0f} MFLOPs per token"
    )
    table = Table(
        "GPUs", "GB of weights", "GB kept", "of GB", "GB sent", "step", "tokens/s", "time"
    )
    for name in args.machines:
        machine = _machine(name, args)
        rows = _rows(args, machine.size, model.context_length)
        found = plan(model, machine, args.batch, activation_bytes(model, rows, dtype))
        steps = args.tokens / args.batch
        table.add_row(
            f"{machine.size}",
            f"{found.state / 1e9:.1f}",
            f"{found.activations / 1e9:.1f}",
            f"{machine.memory / 1e9:.0f}",
            f"{found.exchanged / 1e9:.2f}",
            f"{found.step:.3g} s",
            f"{args.batch / found.step:,.0f}",
            span(steps * found.step),
        )
    console.print(table)


def _rows(args: Arguments, size: int, context_length: int) -> int:
    """Return how many rows a GPU has at a time. Raises ConfigError if there are not enough."""
    share = args.batch // (size * context_length)
    if share < 1:
        raise ConfigError(
            "batch",
            f"{args.batch:,} tokens are less than a row for each of {size} GPUs; give at least "
            f"{size * context_length:,}",
        )
    return min(args.rows, share)


def _machine(name: str, args: Arguments) -> Machine:
    match = re.fullmatch(r"(\d+)x(\d+)", name)
    if match is None or "0" in match.groups():
        raise ConfigError("machines", f"{name!r} is not NODESxGPUS; give 64x8, for example")
    nodes, devices = map(int, match.groups())
    return Machine(
        devices,
        nodes,
        args.tflops * 1e12,
        args.mfu,
        args.memory * 1e9,
        args.link * 1e9,
        args.network * 1e9,
    )
