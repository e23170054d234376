"""Writes the sweep's ledger: one JSON line for every change of state of every run."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gptattn.machine.lock import joined, locked
from gptattn.machine.untrusted import open_to_append
from gptattn.runs.sweep_states import LEDGER, SWEEP_LOCK, read_ledger

CHOSEN = "chosen"  # the state of a line on the sweep, not on a run


class Ledger:
    """Appends to `<folder>/ledger.jsonl`; as a context it also locks the folder for this sweep.

    A line has `time` (seconds since 1970), `run` (the run folder's name) and `state`: submitted,
    running, done, failed, interrupted, or skipped if the run that it starts from is not done. It
    may also have overrides, pid, exit, reason and seconds. A line whose run is "" says that the
    sweep chose to have so many `jobs` at a time, and what the choice was `made_for`. Entering
    raises RunFolderError, which names the process, if another sweep holds the folder.

    With `shared`, machines that enter while others are there belong to one round: their lines have
    its name as `round`, and the machine's as `host`.
    """

    def __init__(self, folder: Path, *, keeps: bool = False, shared: bool = False) -> None:
        """`keeps`: once entered, the folder stays locked until `close`."""
        self.folder, self.keeps, self.shared = folder, keeps, shared
        self.facts: dict[str, str] = {}  # of every line
        self.unwritten: OSError | None = None  # of the first line that could not be written
        self._lock = contextlib.ExitStack()
        self._entered = False

    def __enter__(self) -> Self:
        if self._entered:
            return self
        lock = self.folder / SWEEP_LOCK, "hydra.sweep.dir"
        busy = f"OWNER is running a sweep in {self.folder}; wait for it, or give this one another "
        if self.shared:
            word = self._lock.enter_context(joined(*lock, f"{busy}experiment_name"))
            self.facts = {"host": socket.gethostname(), "round": word}
        else:
            self._lock.enter_context(locked(*lock, f"{busy}experiment_name"))
        self._entered = True
        return self

    def __exit__(self, *args: object) -> None:
        if not self.keeps:
            self.close()

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()
        self._entered = False

    def of(self, folder: Path) -> "Ledger":
        """Return the ledger of another folder of the same sweep."""
        ledger = Ledger(folder, shared=self.shared)
        ledger.facts = self.facts
        return ledger

    def this_round(self, run: str = "") -> list[dict[str, Any]]:
        """Return the lines of this round of machines, on all runs or on one."""
        lines = [line for line in read_ledger(self.folder) if not run or line["run"] == run]
        return [line for line in lines if line.get("round") == self.facts["round"]]

    def note(self, run: str, state: str, **facts: Any) -> None:
        """Append one line. An OSError is kept in `unwritten`: a full disk must not end the runs."""
        line = {"time": round(time.time(), 3), "run": run, "state": state, **self.facts, **facts}
        try:
            data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
            with open_to_append(self.folder / LEDGER) as file:
                if self.shared:  # on a network's disk appending is not atomic
                    fcntl.flock(file, fcntl.LOCK_EX)
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                # A full disk or a kill may have cut the last line: start a new one.
                data = data if file.read(1) in (b"", b"\n") else b"\n" + data
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.unwritten = self.unwritten or error

    def warn_unwritten(self) -> None:
        """Say on stderr if a line could not be written."""
        if self.unwritten is not None:
            print(f"warning: could not write to the ledger: {self.unwritten}", file=sys.stderr)

    def note_jobs(self, jobs: int, made_for: Mapping[str, Any]) -> None:
        """Append how many runs there are at a time, and what this was chosen for."""
        self.note("", CHOSEN, jobs=jobs, made_for=made_for)

    def jobs(self, made_for: Mapping[str, Any]) -> int | None:
        """Return how many runs at a time were last chosen for just this; None: never."""
        lines = [line for line in read_ledger(self.folder) if line.get("state") == CHOSEN]
        own = [line for line in lines if line.get("host") == self.facts.get("host")]
        known = [line.get("jobs") for line in own if line.get("made_for") == made_for]
        return known[-1] if known and type(known[-1]) is int and known[-1] > 0 else None
