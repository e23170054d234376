"""Reads a sweep's ledger, ledger.jsonl: which runs it has, and their states. It needs no torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptattn.machine.lock import is_locked
from gptattn.machine.untrusted import read_bytes
from gptattn.runs.folder import RunFolder

LEDGER = "ledger.jsonl"
SWEEP_LOCK = ".sweep.lock"
LEDGER_BYTES = 100_000_000  # the most that is read; a run's lines take some hundred bytes


def read_ledger(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of the folder's ledger; damaged lines are skipped."""
    try:
        text = read_bytes(folder / LEDGER, LEDGER_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return
    lines = text.splitlines()
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("run"), str):
            yield entry


@dataclass(frozen=True)
class SweepStates:
    """The runs of one sweep, as its ledger has them."""

    folder: Path
    going: bool  # whether a process is running the sweep
    states: dict[str, str]  # run folder's name -> submitted, running, done, failed, ...
    reasons: dict[str, str]  # of those that failed or were skipped


def is_sweep(folder: Path) -> bool:
    """Whether a sweep has been run, or has begun, in this folder."""
    return (folder / LEDGER).is_file() or (folder / SWEEP_LOCK).is_file()


def sweep_states(folder: Path) -> SweepStates:
    """Return the newest state of every run in the folder's ledger."""
    # Before the ledger: what a sweep notes last must not be missed.
    going = is_locked(folder / SWEEP_LOCK)
    states: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for line in read_ledger(folder):
        run, state = line["run"], line.get("state")
        if run and isinstance(state, str):
            states[run] = state
            reasons[run] = str(line.get("reason", ""))
    for run in states:
        # A path in a name would lead elsewhere.
        if Path(run).name == run and RunFolder(folder / run).done:
            states[run] = "done"
    return SweepStates(folder, going, states, {r: why for r, why in reasons.items() if why})
