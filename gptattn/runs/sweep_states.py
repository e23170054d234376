"""What is open in a sweep: the runs that it has planned, from its list of them and their folders.

It needs no torch. `sweep/plan.py` decides which runs are done.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from gptattn.machine.disk import refuse_taken, write_atomically
from gptattn.runs.folder import RunFolder

PLANNED = "sweep.json"
SWEEP_LOCK = ".sweep.lock"


def write_planned(folder: Path, runs: Sequence[str]) -> None:
    """Record the runs of a sweep that starts in the folder, beside those begun by others."""
    if not read_planned(folder):
        refuse_taken(folder, "hydra.sweep.dir", PLANNED)
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
    """Return `5 of 9 runs are done`; None if all are."""
    done = [RunFolder(folder / name).done for name in read_planned(folder)]
    return None if all(done) else f"{sum(done)} of {len(done)} runs are done"
