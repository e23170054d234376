"""Checks and measures everything on one GPU, in parts that go on where they stopped.

python scripts/bench_gpu.py check|train|loop|decode|resume [--out FOLDER] [--seconds 450] [--again]
    [--device cpu --tiny]
After each cell FOLDER/gpu.json holds all cells so far, and FOLDER/gpu.md their table. A cell that
is there is not run again, unless it failed and `--again` is given. After `--seconds` a call ends;
the cell that it was at begins anew in the next call, unless it had the whole time. Needs torch,
numpy and PyYAML; `loop` and `resume` need all that a run needs. With `--device cpu --tiny` it only
shows that it runs. Exit code 1: a check failed, or a cell raised; 2: the call cannot be made, as
where FOLDER's cells are of another device, torch or commit.
"""

import argparse
import gc
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of a tree that is not installed

from gpu.lab import Cell, Lab

from gptattn.machine.device import device_name, git_commit

FILE = "gpu.json"
PARTS = {  # -> where its cells are
    "check": ("gpu.checks", "cells"),
    "train": ("gpu.speeds", "train_cells"),
    "loop": ("gpu.whole_runs", "loop_cells"),
    "decode": ("gpu.speeds", "decode_cells"),
    "resume": ("gpu.whole_runs", "resume_cells"),
}
Cells = dict[str, Cell]
SHARE = 0.9  # a cell that had so much of the call's time gets no more in another call


@dataclass
class Record:
    """What gpu.json holds: what measured, and part -> cell -> values."""

    by: dict[str, Any]
    parts: dict[str, Cells]


class OutOfTime(BaseException):
    """Raised in a cell when the call's time is over; code that catches Exceptions lets it pass."""


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
        sys.exit("error: --device: no GPU is visible to torch; give --device cpu --tiny")
    lab = Lab(torch.device(args.device), args.tiny)
    try:
        record, known = read(args.out / FILE, lab), cells_of(args.part)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = record.parts.setdefault(args.part, {})
    again = {name for name, cell in cells.items() if args.again and failed(cell)}
    due = {name: cell for name, cell in known.items() if name not in cells or name in again}
    for name, found in measured(due, lab, args.seconds):
        cells[name] = found
        write(args.out / FILE, json.dumps(asdict(record), indent=1))
        write(args.out / "gpu.md", table(record))
        print(f"{args.part}: {name}: {words(found)}", flush=True)
    return int(any(failed(cells[name]) for name in known if name in cells))


def read(file: Path, lab: Lab) -> Record:
    """Return the record so far. Raises ValueError if something else made it."""
    device = device_name(lab.device)
    commit, version = git_commit(), str(torch.__version__)
    by = {"device": device, "tiny": lab.tiny, "torch": version, "commit": commit}
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        return Record(by, {})
    content = json.loads(file.read_text("utf-8"))
    before = content.get("by", {})
    other = ", ".join(f"{key} {before.get(key)}" for key in by if before.get(key) != by[key])
    if other:
        raise ValueError(f"--out: {file} was made with {other}; give another folder")
    return Record(by, content["parts"])


def cells_of(part: str) -> dict[str, Callable[[Lab], Cell]]:
    """Return the cells of a part. Raises ImportError where a package is missing."""
    module, name = PARTS[part]
    return getattr(importlib.import_module(module), name)()


def measured(
    cells: Mapping[str, Callable[[Lab], Cell]], lab: Lab, seconds: float
) -> Iterator[tuple[str, Cell]]:
    """Yield the name and the values of each cell that ends in so many seconds from now."""
    until = time.monotonic() + seconds
    for name, cell in cells.items():
        left = until - time.monotonic()
        found = run(cell, lab, left) if left > 0 else None
        if found is None and left < SHARE * seconds:
            print(f"{seconds:g} s are over before the end of {name}; the same call goes on there")
            return
        slow = {"error": f"takes more than {left:.0f} s", "ok": False, "seconds": left}
        yield name, slow if found is None else found


def run(cell: Callable[[Lab], Cell], lab: Lab, most: float) -> Cell | None:
    """Return the cell's values and the seconds that it took, or its error; None after `most`."""
    start = time.monotonic()
    try:
        with at_most(most):
            found = cell(lab)
    except OutOfTime:
        found = None
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}", "ok": False}
    gc.collect()
    if lab.on_gpu:
        torch.cuda.set_sync_debug_mode("default")  # a cell that raised may have left it
        torch.cuda.empty_cache()
    return None if found is None else found | {"seconds": round(time.monotonic() - start, 2)}


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in this block after so many seconds."""

    def over(signum: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    for part, cells in record.parts.items():
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
