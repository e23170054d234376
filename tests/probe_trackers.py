"""Trackers that exist for tests: one that keeps what it is given, and fails where it is told to."""

import threading
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from gptattn.training.trackers.tracker import TrackedRun, Tracker

RELEASE = threading.Event()  # what a tracker that hangs waits for


class Lines(CSVLogger):
    """Lightning's logger, with a line per call in a file that stays; may fail in a call."""

    def __init__(self, run: TrackedRun, file: Path, fails: str | None) -> None:
        super().__init__(run.place, "lines", version=run.id or "an-id")
        self.file, self.fails = file, fails

    def note(self, call: str, line: str) -> None:
        if self.fails == f"hangs in {call}":
            RELEASE.wait()
        if self.fails is not None and line.startswith(self.fails):
            raise ConnectionError(f"no answer\nto {line}")
        with self.file.open("a") as opened:
            opened.write(f"{line}\n")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.note("log", f"row {step} {' '.join(metrics)}")

    def save(self) -> None:
        self.note("save", "save")

    def finalize(self, status: str) -> None:
        self.note("close", f"close {status}")


class Kept(Tracker):
    """Keeps lines in the file `place`, of the run's folder; `fails`: the beginning of a line."""

    def __init__(self, place: str, fails: str | None) -> None:
        self.place, self.fails = place, fails

    def open(self, run: TrackedRun) -> Any:
        logger = Lines(run, run.place / self.place, self.fails)
        logger.note("open", f"open {run.id}")
        return logger


class Absent(Kept):
    """Needs a library that nobody has."""

    libraries = ("no_such_library",)

    def __init__(self) -> None:
        super().__init__("none", None)
