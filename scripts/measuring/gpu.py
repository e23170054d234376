"""Checks on one GPU: what must hold before figures of `bench.py train` and `decode` mean anything.

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
from measuring.rounds import option_parser


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = option_parser("gpu", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    return parser


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run the checks; print and return what they found."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device: no GPU is visible to torch; give --device cpu --tiny")
    lab = Lab(torch.device(args.device), args.tiny)
    cells: dict[str, Cell] = {}
    for name, cell in check_cells().items():
        cells[name] = run_cell(cell, lab)
        print(f"{name}: {cells[name]}", flush=True)
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
