"""The sweep folder's ledger: one JSON line for every change of state of every run."""

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from gptattn.machine.lock import locked
from gptattn.machine.untrusted import open_to_append, read_bytes

NAME = "ledger.jsonl"
LOCK = ".sweep.lock"
LEDGER_BYTES = 100_000_000  # a run's lines come to some hundred bytes


class Ledger:
    """Appends to `<folder>/ledger.jsonl` while it holds the folder against other sweeps.

    A line has `time` (seconds since 1970), `run` (the run folder's name), `state` (running, done,
    failed, interrupted; skipped where the run it starts from is not done) and what else is known:
    overrides, pid, exit, reason, seconds. Raises RunFolderError, naming the process, where another
    sweep is at work in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unwritten: OSError | None = None  # the first line that the disk would not take
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._lock.enter_context(
            locked(
                self.folder / LOCK,
                "hydra.sweep.dir",
                f"OWNER runs a sweep in {self.folder}; wait for it, or give this one "
                "another experiment_name",
            )
        )
        return self

    def __exit__(self, *args: object) -> None:
        self._lock.close()

    def note(self, run: str, state: str, **facts: Any) -> None:
        """Append one line. A disk that is full must not stop the others: see `unwritten`."""
        line = {"time": round(time.time(), 3), "run": run, "state": state, **facts}
        try:
            data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
            with open_to_append(self.folder / NAME) as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                # After a line that was cut short, by a full disk or a kill, on a line of its own.
                data = data if file.read(1) in (b"", b"\n") else b"\n" + data
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.unwritten = self.unwritten or error


def read_ledger(folder: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of the folder's ledger; what is cut short is passed over."""
    try:
        text = read_bytes(folder / NAME, LEDGER_BYTES).decode("utf-8", errors="replace")
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
