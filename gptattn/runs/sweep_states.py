"""The state of each run of a sweep, from its list of runs and their folders, for the report.

It needs no torch. `sweep/plan.py` decides which runs are done.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptattn.machine.disk import write_atomically
from gptattn.machine.lock import is_locked
from gptattn.runs.folder import LOCK, RunFolder

PLANNED = "sweep.json"
SWEEP_LOCK = ".sweep.lock"


@dataclass(frozen=True)
class SweepStates:
    """The runs of one sweep."""

    folder: Path
    going: bool  # whether a process is running the sweep
    states: dict[str, str]  # run folder's name -> submitted, running, done or failed
    reasons: dict[str, str]  # of those that failed


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


def is_sweep(folder: Path) -> bool:
    """Whether a sweep has been run, or has begun, in this folder."""
    return (folder / PLANNED).is_file() or (folder / SWEEP_LOCK).is_file()


def sweep_states(folder: Path) -> SweepStates:
    """Return the state of every run that sweeps in the folder have planned."""
    going = is_locked(folder / SWEEP_LOCK)  # first: what a sweep makes last must not be missed
    states: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name in read_planned(folder):
        run = RunFolder(folder / name)
        if run.done:
            states[name] = "done"
        elif (failure := run.read_failure()) is not None:
            states[name], reasons[name] = "failed", str(failure.get("error", ""))
        elif is_locked(run.path / LOCK):
            states[name] = "running"
        else:
            states[name] = "submitted"
    return SweepStates(folder, going, states, reasons)
