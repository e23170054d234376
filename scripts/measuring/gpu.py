"""Checks and speeds on one GPU.

check   what must hold before the figures mean anything
train   steps of GPT-2 small, beside transformers' model
loop    whole runs of train.py, their clock against CUDA's events
decode  tokens one by one

Exit code 1: a check failed, or a cell raised. `--device cpu --tiny` shows that everything runs.
"""

import argparse
import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch

from measuring.gpu_checks import check_cells
from measuring.gpu_lab import Cell, Lab
from measuring.gpu_speeds import decode_cells, loop_cells, train_cells
from measuring.rounds import option_parser

PARTS: dict[str, Callable[[], dict[str, Callable[[Lab], Cell]]]] = {
    "check": check_cells,
    "train": train_cells,
    "loop": loop_cells,
    "decode": decode_cells,
}


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = option_parser("gpu", __doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    return parser


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run the part's cells; print and return them."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device: no GPU is visible to torch; give --device cpu --tiny")
    lab = Lab(torch.device(args.device), args.tiny)
    cells: dict[str, Cell] = {}
    for name, cell in PARTS[args.part]().items():
        cells[name] = run_cell(cell, lab)
        shown = ", ".join(f"{key} {round_value(value)}" for key, value in cells[name].items())
        print(f"{args.part}: {name}: {shown}", flush=True)
    return cells, int(any(cell.get("ok") is False for cell in cells.values()))


def run_cell(cell: Callable[[Lab], Cell], lab: Lab) -> Cell:
    """Return the cell's values, or its error."""
    try:
        found = cell(lab)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}", "ok": False}
    gc.collect()
    if lab.on_gpu:
        torch.cuda.set_sync_debug_mode("default")  # a cell that raised may have left it
        torch.cuda.empty_cache()
    return found


def round_value(value: Any) -> str:
    """Return a number with three digits or more, a truth as yes or NO, else the value itself."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return str(value)
