"""What is open in a sweep: the runs that it has planned, from its list of them and their folders.

It needs no torch. `sweep/plan.py` decides which runs are done.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gptattn.machine.disk import write_atomically
from gptattn.machine.lock import is_locked
from gptattn.runs.folder import LOCK, RunFolder

PLANNED = "sweep.json"
SWEEP_LOCK = ".sweep.lock"


def write_planned(folder: Path, runs: Sequence[str]) -> None:
    """Record the runs of a sweep that starts in the folder, beside those begun by others."""
    begun = [run for run in read_planned(folder) if RunFolder(folder / run).begun]
    known = dict.fromkeys([*begun, *runs])
    text = json.dumps({"runs": list(known)}, indent=1)
    write_atomically(folder / PLANNED, lambda file: file.write(f"{text}\n".encode()))


def read_planned(folder: Path) -> list[str]:
    """Return the names of the runs of sweeps in the folder; none without a record."""
    try:
        return [str(run) for run in json.loads((folder / PLANNED).read_bytes())["runs"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def describe_open(folder: Path) -> str | None:
    """Return `5 of 9 runs are done; 2 running, 1 failed, 1 planned`; None if all are done."""
    going = is_locked(folder / SWEEP_LOCK)  # first: what a sweep makes last must not be missed
    states = Counter(_state(RunFolder(folder / name), going) for name in read_planned(folder))
    if states["done"] == states.total():
        return None
    kinds = ("running", "failed", "planned", "stopped")
    others = [f"{states[one]} {one}" for one in kinds if states[one]]
    return f"{states['done']} of {states.total()} runs are done; {', '.join(others)}"


def _state(run: RunFolder, going: bool) -> str:
    if run.done:
        return "done"
    if run.read_failure() is not None:
        return "failed"
    if is_locked(run.path / LOCK):
        return "running"
    return "planned" if going else "stopped"
