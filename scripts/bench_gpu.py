"""Checks and measures everything on one GPU, in parts that go on where they stopped.

python scripts/bench_gpu.py check|train|loop|decode|resume [--out FOLDER] [--seconds 450] [--again]
    [--device cpu --tiny]
After each cell FOLDER/gpu.json holds all cells so far, and FOLDER/gpu.md their table. A cell that
is there is not run again, unless it failed and `--again` is given. No cell begins after `--seconds`
of this call. Needs torch, numpy and PyYAML; `loop` and `resume` need all that a run needs. With
`--device cpu --tiny` it only shows that it runs. Exit code 1: a check failed, or a cell raised.
"""

import argparse
import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of a tree that is not installed

from gpu.lab import Cell, Lab

PARTS = {  # -> where its cells are
    "check": ("gpu.checks", "cells"),
    "train": ("gpu.speeds", "train_cells"),
    "loop": ("gpu.whole_runs", "loop_cells"),
    "decode": ("gpu.speeds", "decode_cells"),
    "resume": ("gpu.whole_runs", "resume_cells"),
}
Record = dict[str, dict[str, Cell]]  # part -> cell -> values


def main(given: list[str] | None = None) -> int:
    """Run the parts that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(description="Checks and measures everything on one GPU.")
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_bench"))
    parser.add_argument("--seconds", type=float, default=450.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(given)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: no GPU is visible to torch; give --device cpu --tiny")
    lab = Lab(torch.device(args.device), args.tiny)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "gpu.json"
    record: Record = json.loads(file.read_text("utf-8")) if file.exists() else {}
    until = time.monotonic() + args.seconds
    cells = record.setdefault(args.part, {})
    for name, cell in cells_of(args.part).items():
        if name in cells and not (args.again and failed(cells[name])):
            continue
        if time.monotonic() > until:
            print(f"{args.seconds:g} s are over before {name}; the same call goes on from there")
            break
        cells[name] = found = run(cell, lab)
        write(file, json.dumps(record, indent=1))
        write(args.out / "gpu.md", table(record))
        print(f"{args.part}: {name}: {words(found)}", flush=True)
    return int(any(map(failed, cells.values())))


def cells_of(part: str) -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of a part; where a package is missing, one that says so."""
    module, name = PARTS[part]
    try:
        return getattr(importlib.import_module(module), name)()
    except ImportError as error:
        missing = str(error)
        return {"imports": lambda lab: {"error": missing, "ok": False}}


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


def words(cell: Cell) -> str:
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


def table(record: Record) -> str:
    """Return the cells as a Markdown table."""
    lines = ["| part | cell | found | s |", "|---|---|---|---:|"]
    for part, cells in record.items():
        for name, cell in cells.items():
            found = words(cell).replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {part} | {name} | {found} | {cell['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def write(file: Path, text: str) -> None:
    """Replace the file in one go: a call that is killed leaves the one before."""
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


if __name__ == "__main__":
    sys.exit(main())
