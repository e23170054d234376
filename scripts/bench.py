"""Measures speed and memory: `python scripts/bench.py PART`; `PART --help` lists its arguments.

train      training steps beside other libraries' models, start-up, peak memory
attention  one layer, forward and backward, beside torch's module and a tutorial's classes
decode     the whole model beside transformers' `generate`, and one layer against a long cache
ddp        two processes that share a batch, and what they exchange
gpu        one GPU: kernels, steps, peers, mechanisms, goals, each alone and in order of use

Whatever a part compares takes turns within one run, in a new random order each round. It prints
medians, their spread, and ratios paired by round. The last line is JSON.
"""

import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

PARTS = ("train", "attention", "decode", "ddp", "gpu")


def main(arguments: Sequence[str]) -> int:
    """Run the part that is asked for; return the exit code."""
    if not arguments or arguments[0] not in PARTS:
        print(ast.get_docstring(ast.parse(Path(__file__).read_text("utf-8"))))  # also under -OO
        return 0 if arguments in ([], ["-h"], ["--help"]) else 2
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of a tree that is not installed
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
