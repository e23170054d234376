"""Measures speed and memory: `python scripts/bench.py PART`; `PART --help` lists its arguments.

train      training steps and peak memory, next to other libraries' models
attention  one layer, forward and backward, next to torch's module and a tutorial's classes
decode     the whole model next to transformers' `generate`, and one layer with a long cache
ddp        two processes that share a batch, next to one
gpu        one GPU: kernels, steps, peers, mechanisms and goals, each in its own process

Everything a part compares takes turns within one run, in a new random order each round. A part
prints medians, their spread, and ratios paired by round. The last line is JSON.
"""

import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

PARTS = ("train", "attention", "decode", "ddp", "gpu")


def main(arguments: Sequence[str]) -> int:
    """Run the requested part; return the exit code."""
    if not arguments or arguments[0] not in PARTS:
        print(ast.get_docstring(ast.parse(Path(__file__).read_text("utf-8"))))  # works under -OO
        return 0 if arguments in ([], ["-h"], ["--help"]) else 2
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if not installed
    from gptattn.cli.arguments import run_script

    name, *options = arguments
    part = importlib.import_module(f"measuring.{name}")

    def run(arguments: Sequence[str]) -> None:
        results, code = part.measure(arguments)
        print(json.dumps({"bench": name, **results}))
        if code:
            raise SystemExit(code)

    return run_script(run, part.Arguments, [f"{sys.argv[0]} {name}", *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
