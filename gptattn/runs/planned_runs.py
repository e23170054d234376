"""The runs that a sweep has planned; `sweep/plan.py` decides which of them are done."""

from collections.abc import Sequence
from pathlib import Path

from gptattn.machine.disk import read_json, refuse_taken, write_json
from gptattn.runs.folder import RunFolder

PLANNED = "sweep.json"
SWEEP_LOCK = ".sweep.lock"


def write_planned(folder: Path, runs: Sequence[str]) -> None:
    """Record the runs of a sweep that starts in the folder; those begun by others stay."""
    if not read_planned(folder):
        refuse_taken(folder, "hydra.sweep.dir", PLANNED)
    begun = [run for run in read_planned(folder) if RunFolder(folder / run).begun]
    planned = dict.fromkeys([*begun, *runs])
    write_json(folder / PLANNED, {"runs": [*planned]})


def read_planned(folder: Path) -> list[str]:
    """Return the names of the runs of sweeps in the folder; empty without a record."""
    return (read_json(folder / PLANNED, dict[str, list[str]]) or {}).get("runs", [])
