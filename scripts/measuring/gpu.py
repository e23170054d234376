"""Checks and speeds on one GPU, in parts that continue where they stopped.

check   what must hold before the figures mean anything
train   steps of GPT-2 small, beside transformers' model
loop    whole runs of train.py, their clock against CUDA's events
decode  tokens one by one, beside what CUDA graphs would give

After each cell `--out` holds gpu.json with all cells so far. A cell that is there is not run again,
unless it failed and `--again` is given. No cell begins after `--seconds`. Exit code 1: a check
failed, or a cell raised. `--device cpu --tiny` only shows that everything runs.
"""

import argparse
import gc
import importlib
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gptattn.machine.device import device_name, git_commit
from gptattn.machine.disk import write_atomically
from measuring.gpu_lab import Cell, Lab
from measuring.rounds import option_parser

PARTS = {  # -> the module and the function that returns the part's cells by name
    "check": ("gpu_checks", "check_cells"),
    "train": ("gpu_speeds", "train_cells"),
    "loop": ("gpu_speeds", "loop_cells"),
    "decode": ("gpu_speeds", "decode_cells"),
}
Cells = dict[str, Cell]


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = option_parser("gpu", __doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--seconds", type=float, default=450.0)
    parser.add_argument("--again", action="store_true", help="run failed cells again")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    return parser


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run the cells of a part that are not there yet; return all of the part's cells."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device: no GPU is visible to torch; give --device cpu --tiny")
    lab = Lab(torch.device(args.device), args.tiny)
    parts = read_cells(args.out / "gpu.json", made_by(lab))
    cells = parts.setdefault(args.part, {})
    module, function = PARTS[args.part]
    known: dict[str, Callable[[Lab], Cell]] = getattr(
        importlib.import_module(f"measuring.{module}"), function
    )()
    end = time.monotonic() + args.seconds
    for name, cell in known.items():
        if name in cells and not (args.again and failed(cells[name])):
            continue
        if time.monotonic() > end:
            print(f"{args.seconds:g} s are over before {name}; the same command continues there")
            break
        cells[name] = run(cell, lab)
        record = json.dumps({"by": made_by(lab), "parts": parts}, indent=1)
        write_atomically(args.out / "gpu.json", lambda out, text=record: out.write(text.encode()))
        print(f"{args.part}: {name}: {words_of(cells[name])}", flush=True)
    return cells, int(any(failed(cells[name]) for name in known if name in cells))


def made_by(lab: Lab) -> dict[str, Any]:
    """Return what must be equal for cells of one record."""
    by = {"device": device_name(lab.device), "tiny": lab.tiny}
    return by | {"torch": str(torch.__version__), "commit": git_commit()}


def read_cells(file: Path, by: dict[str, Any]) -> dict[str, Cells]:
    """Return part -> cell -> values, so far; exit if something else made them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        return {}
    record = json.loads(file.read_text("utf-8"))
    other = ", ".join(f"{k} {record['by'].get(k)}" for k in by if record["by"].get(k) != by[k])
    if other:
        raise SystemExit(f"error: --out: {file} was made with {other}; give another folder")
    return record["parts"]


def run(cell: Callable[[Lab], Cell], lab: Lab) -> Cell:
    """Return the cell's values and the seconds that it took, or its error."""
    start = time.monotonic()
    try:
        found = cell(lab)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}", "ok": False}
    gc.collect()
    if lab.on_gpu:
        torch.cuda.set_sync_debug_mode("default")  # a cell that raised may have left it
        torch.cuda.empty_cache()
    return found | {"seconds": round(time.monotonic() - start, 2)}


def failed(cell: Cell) -> bool:
    """Return whether a check does not hold; a measurement has none."""
    return cell.get("ok") is False


def words_of(cell: Cell) -> str:
    """Return the values of a cell in one line."""
    shown = ((name, value) for name, value in cell.items() if name != "seconds")
    return ", ".join(f"{name} {rounded(value)}" for name, value in shown)


def rounded(value: Any) -> str:
    """Return a number with three digits or more, a truth as yes or NO, else the value itself."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return str(value)
