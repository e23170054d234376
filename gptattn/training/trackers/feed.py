"""Gives the rows of a run to its trackers, so that none of them can stop or slow the training."""

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from gptattn.errors import DiskError
from gptattn.machine.disk import make_folder
from gptattn.runs.folder import RunFolder
from gptattn.runs.tracker_states import (
    TrackerState,
    metric_rows,
    numbers,
    read_state,
    sent,
    write_state,
)
from gptattn.training.trackers.tracker import TrackedRun, Tracker

# Seconds that a run waits for a tracker: at its start, so that the import of a large library does
# not slow its first steps, at its end, and when it is stopped.
OPENING, ENDING, STOPPING = 30.0, 60.0, 5.0


class Feed:
    """One tracker of a run, on a thread of its own.

    It first gets the rows of metrics.jsonl that it lacks: all of them, if it is new to the run. If
    it fails, one line says so. The next validation, or the end of the run, opens it anew, and it
    gets what it missed.
    `settings`: of the tracker. `rows`: the number of rows in metrics.jsonl.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        settings: dict[str, Any],
        run: TrackedRun,
        folder: RunFolder,
        rows: int,
    ) -> None:
        self.name, self._tracker, self._run, self._folder = name, tracker, run, folder
        new = TrackerState(settings)
        self._state = read_state(folder, name, settings) if tracker.keeps else new
        self._held = rows if self._state.rows is None else min(rows, self._state.rows)
        self._ahead = set(self._state.ahead)
        self._logger: Any = None  # None: not open, or it has failed
        self._told = False  # that it has failed
        self._ended = False  # nobody waits for it any more
        self._tried = threading.Event()
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._tasks.put(lambda: self._open(rows))
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def wait_for_opening(self) -> None:
        """Wait until the tracker is open or has failed, or for `OPENING` seconds."""
        self._tried.wait(OPENING)

    def row(self, step: int, values: Mapping[str, Any], rows: int) -> None:
        """Log a row, which is number `rows` of metrics.jsonl."""
        metrics = numbers(dict(values))
        if metrics:
            self._tasks.put(lambda: self._row(step, metrics, rows))

    def save(self, rows: int) -> None:
        """Write what is held back; open the tracker anew if it has failed."""
        self._tasks.put(lambda: self._save(rows))

    def end(self, done: bool, rows: int) -> None:
        """Close the tracker once it has all rows; `wait` waits for that.

        One that has failed is opened anew if the run is done, or it would never get the last rows.
        """
        if done:
            self._tasks.put(lambda: self._reopen(rows))
        self._tasks.put(lambda: self._close(done))
        self._tasks.put(None)

    def wait(self, done: bool) -> None:
        """Wait for the end, but not for long: a run that is stopped waits least."""
        seconds = ENDING if done else STOPPING
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"is not done after {seconds:g} seconds")
            self._ended = True

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                logger, self._logger = self._logger, None
                with contextlib.suppress(Exception):
                    self._tracker.close(logger, False)
                reason = (str(error).splitlines() or [""])[0][:200]
                self._fail(f"{type(error).__name__}: {reason}".removesuffix(": "))
            finally:
                self._tried.set()

    def _fail(self, reason: str) -> None:
        """Say once that the tracker has failed, and note how many rows it has."""
        if self._ended:
            return
        if not self._told:
            print(
                f"warning: logger: {self.name}: {reason}; the run goes on, and metrics.jsonl has "
                "all rows",
                file=sys.stderr,
            )
        self._told = True
        if self._tracker.keeps and self._folder.path.is_dir():
            with contextlib.suppress(DiskError, OSError):
                self._keep_state(self._held)

    def _open(self, rows: int) -> None:
        make_folder(self._folder.trackers, self._folder.path)
        keeps = self._tracker.keeps
        self._held = self._held if keeps else 0
        self._logger = self._tracker.open(replace(self._run, id=self._state.id))
        if keeps:
            self._state.id = str(self._logger.version)
            self._keep_state(self._held)
        for number, step, metrics in metric_rows(self._folder, self._held, rows):
            self._row(step, metrics, number)
        self._held = rows
        if keeps:
            self._keep_state(None)

    def _row(self, step: int, metrics: dict[str, float], number: int) -> None:
        if self._logger is None:
            return
        if sent(step, metrics) not in self._ahead:
            self._logger.log_metrics(metrics, step)
        self._held = number

    def _save(self, rows: int) -> None:
        if not self._reopen(rows):
            self._logger.save()

    def _reopen(self, rows: int) -> bool:
        if self._logger is not None:
            return False
        self._open(rows)
        return True

    def _close(self, done: bool) -> None:
        logger, self._logger = self._logger, None
        if logger is not None:
            self._tracker.close(logger, done)

    def _keep_state(self, rows: int | None) -> None:
        """Write the state, unless nobody waits any more; `rows` is as in `TrackerState`."""
        self._state.rows = rows
        if not self._ended:
            write_state(self._folder, self.name, self._state)
