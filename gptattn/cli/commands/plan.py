"""Works out what training a model on GPUs would take: `gptattn-plan model=gpt2_small`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gptattn.cli.arguments import Names, parse
from gptattn.cli.script import run_script
from gptattn.errors import ConfigError
from gptattn.settings.values import within

if TYPE_CHECKING:
    from rich.table import Table

    from gptattn.model.gpt import GPT
    from gptattn.model.scale import Machine

HELP = """\
COMMAND model=gpt2_small machines=1x1,1x8,64x8

  tokens=1e10       training tokens
  batch=524288      tokens per optimizer step, of all GPUs together
  rows=16           the most rows of the context on a GPU at a time
  vocab=50304       ids of the tokenizer
  machines=1x1,1x8,64x8
                    nodes x GPUs in each
  tflops=989        a GPU's peak in 10^12 FLOPs per second; these are an H100's
  mfu=0.4           the share of it that training reaches
  memory=80         GB of a GPU
  link=450          GB per second from a GPU to others of its node
  network=50        GB per second from a GPU to other nodes
  precision=bf16    or float32, of what is kept for the backward pass

All other settings are those of training.
"""
MACHINES = Names("1x1,1x8,64x8")


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


OWN = re.compile(f"({'|'.join(Arguments.__dataclass_fields__)})=")


def main() -> int:
    """Run `gptattn-plan`; return the exit code."""
    return run_script(HELP, run)


def run(arguments: Sequence[str]) -> None:
    """Print a row for each number of machines. Raises ConfigError, which names the argument."""
    own = [argument for argument in arguments if OWN.match(argument)]
    args = parse(Arguments, own)
    machines = [_machine(name, args) for name in args.machines]
    if not machines:
        raise ConfigError("machines", "is empty; give 1x1,64x8, for example")
    if args.precision not in ("bf16", "float32"):
        raise ConfigError("precision", f"{args.precision} is not known; give bf16 or float32")

    from torch._subclasses.fake_tensor import FakeTensorMode

    from gptattn.settings.compose import settings
    from gptattn.machine.console import make_console
    from gptattn.model.cost import measure_cost, parameter_count
    from gptattn.settings.build import build_model

    cfg = settings([argument for argument in arguments if argument not in own])
    console = make_console()
    with FakeTensorMode():  # a model of any size takes no memory
        model = build_model(cfg, args.vocab)
        flops = measure_cost(model).flops_per_token
        console.print(
            f"{parameter_count(model):,} parameters, {flops / 1e6:,.0f} MFLOPs per token, "
            f"{args.tokens * flops / 1e18:,.1f} x 10^18 FLOPs in all"
        )
        console.print(_table(model, machines, args))


def _table(model: "GPT", machines: Sequence["Machine"], args: Arguments) -> "Table":
    import torch
    from rich.table import Table

    from gptattn.machine.console import span
    from gptattn.model.scale import activation_bytes, plan

    dtype = torch.float32 if args.precision == "float32" else torch.bfloat16
    table = Table(
        "GPUs", "rows", "GB of state", "GB kept", f"of {args.memory:g} GB", "GB sent", "exchange",
        "step", "tokens/s", "in all",
    )  # fmt: skip
    held: dict[int, int] = {}
    for machine in machines:
        rows = _rows(args, machine.size, model.context_length)
        held[rows] = held.get(rows) or activation_bytes(model, rows, dtype)
        found = plan(model, machine, args.batch, rows)
        table.add_row(
            f"{machine.size}",
            f"{rows}",
            f"{found.state / 1e9:.1f}",
            f"{held[rows] / 1e9:.1f}",
            f"{(found.state + held[rows]) / args.memory / 1e9:.0%}",
            f"{found.exchanged / 1e9:.2f}",
            f"{found.exchanging:.3g} s",
            f"{found.step:.3g} s",
            f"{args.batch / found.step:,.0f}",
            span(args.tokens / args.batch * found.step),
        )
    return table


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


def _machine(name: str, args: Arguments) -> "Machine":
    from gptattn.model.scale import Machine

    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,3})", name)
    if match is None:
        raise ConfigError("machines", f"{name!r} is not NODESxGPUS; give 64x8, for example")
    nodes, devices = map(int, match.groups())
    peak, link, network = args.tflops * 1e12, args.link * 1e9, args.network * 1e9
    return Machine(devices, nodes, peak, args.mfu, link, network)
