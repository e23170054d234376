"""Runs of a sweep that several machines share: each is taken once.

A run is claimed by a lock on its console.log, which its process inherits. So the claim ends with
the processes of sweep and run, or with their machine, and another machine may take the run over.
"""

import fcntl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from gptattn.errors import UserError
from gptattn.runs.folder import RunFolder
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.processes import Outcome, Queue, Work, open_log

LOOK_SECONDS = 5.0  # between reads of what other machines have noted


class SharedQueue(Queue):
    """The works that no machine has ended; those that another one has are put aside meanwhile."""

    def __init__(
        self,
        works: Sequence[Work],
        ledger: Ledger,
        again: Callable[[Work], Work],
        tell: Callable[[str], object],
        tries: int = 1,
    ) -> None:
        """`again` makes a work that goes on with a begun run; after `tries` a failed one ends."""
        super().__init__(works)
        self._ledger, self._again, self._tell, self._tries = ledger, again, tell, tries
        self._aside: list[Work] = []
        self._ended: list[tuple[Work, Outcome]] = []
        self._looked, self._told = time.monotonic(), False

    def __bool__(self) -> bool:
        return bool(self._waiting or self._aside or self._ended)

    def take(self) -> tuple[Work, IO[bytes] | None] | None:
        while self._waiting:
            work = self._waiting.pop(0)
            try:
                log = open_log(work)
            except (OSError, UserError):
                return work, None  # whoever starts it meets the error again, and tells
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.close()
                self._aside.append(work)
                continue
            lines = self._ledger.this_round(work.folder.name)
            outcome = self._outcome(work, lines)
            if outcome is None and RunFolder(work.folder).done:  # and whoever did it died at once
                outcome = Outcome(work.folder, 0, "", 0.0)
            if outcome is None:
                return self._begun(work, lines), log
            log.close()
            self._ended.append((work, outcome))
        if self._aside and not self._told:
            self._told = True
            names = ", ".join(work.folder.name for work in self._aside)
            self._tell(f"no run is left to begin; other machines are at work on {names}")
        return None

    def ended_elsewhere(self) -> Sequence[tuple[Work, Outcome]]:
        if time.monotonic() - self._looked > LOOK_SECONDS and (self._aside or self._waiting):
            self._looked = time.monotonic()
            lines: dict[str, list[Mapping[str, Any]]] = {}
            for line in self._ledger.this_round():
                lines.setdefault(line["run"], []).append(line)
            works, self._aside, self._waiting = [*self._aside, *self._waiting], [], []
            for work in works:
                outcome = self._outcome(work, lines.get(work.folder.name, []))
                if outcome is None:
                    self._waiting.append(work)
                else:
                    self._ended.append((work, outcome))
        ended, self._ended = self._ended, []
        return ended

    def _outcome(self, work: Work, lines: Sequence[Mapping[str, Any]]) -> Outcome | None:
        """Return how the run has ended in this round; None if it has not, or may be tried again."""
        ends = [line for line in lines if line["state"] in ("done", "failed")]
        if not ends or (ends[-1]["state"] == "failed" and len(ends) < self._tries):
            return None
        end = ends[-1]
        seconds, host = end.get("seconds", 0.0), end["host"]
        return Outcome(work.folder, end["exit"], end.get("reason", ""), seconds, host)

    def _begun(self, work: Work, lines: Sequence[Mapping[str, Any]]) -> Work:
        """Return the work, to go on with its run if another machine has begun it."""
        hosts = [line["host"] for line in lines if line["state"] == "running"]
        if hosts:
            self._tell(f"{work.folder.name} has stopped on {hosts[-1]} and goes on here")
        return self._again(work) if RunFolder(work.folder).begun else work
