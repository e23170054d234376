"""What is open in a sweep: the runs that it has planned, from its list of them and their folders.

It needs no torch. `sweep/plan.py` decides which runs are done.
"""

from collections.abc import Sequence
from pathlib import Path

from gptattn.machine.disk import read_json, refuse_taken, write_json
from gptattn.runs.folder import RunFolder

PLANNED = "sweep.json"
SWEEP_LOCK = ".sweep.lock"


def write_planned(folder: Path, runs: Sequence[str]) -> None:
    """Record the runs of a sweep that starts in the folder, beside those begun by others."""
    if not read_planned(folder):
        refuse_taken(folder, "hydra.sweep.dir", PLANNED)
    begun = [run for run in read_planned(folder) if RunFolder(folder / run).begun]
    known = dict.fromkeys([*begun, *runs])
    write_json(folder / PLANNED, {"runs": [*known]})


def read_planned(folder: Path) -> list[str]:
    """Return the names of the runs of sweeps in the folder; none without a record."""
    return (read_json(folder / PLANNED, dict[str, list[str]]) or {}).get("runs", [])


def describe_open(folder: Path) -> str | None:
    """Return `5 of 9 runs are done`; None if all are."""
    done = [RunFolder(folder / name).done for name in read_planned(folder)]
    return None if all(done) else f"{sum(done)} of {len(done)} runs are done"
