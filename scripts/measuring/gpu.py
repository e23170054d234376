"""Checks on one GPU: what must hold before figures of `bench.py train` and `decode` mean anything.

Exit code 1: a check failed, or a cell raised. `device=cpu tiny=true` shows that everything runs.
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gptattn.cli.arguments import option, parse
from gptattn.errors import ConfigError
from measuring.gpu_checks import check_cells
from measuring.gpu_lab import Cell, Lab


@dataclass(frozen=True)
class Arguments:
    """device=cpu tiny=true"""

    device: Literal["cuda", "cpu"] = option("cuda or cpu", "cuda")
    tiny: bool = option("true: sizes for a CPU", False)


def measure(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run the checks; print and return what they found."""
    args = parse(Arguments, arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "no GPU is visible to torch; give device=cpu tiny=true")
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
