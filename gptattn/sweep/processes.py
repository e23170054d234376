"""Runs commands, several at a time, each in its own process; one failure does not stop others."""

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from gptattn.errors import OutOfMemory, UserError
from gptattn.machine.signals import WORDS
from gptattn.machine.untrusted import open_to_append
from gptattn.runs.folder import RunFolder
from gptattn.sweep.fork_server import Copy, ForkServer
from gptattn.sweep.ledger import Ledger

POLL_SECONDS = 0.2
GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL
LAST_BYTES = 16_384  # of a console.log that are searched for the error


@dataclass(frozen=True)
class Work:
    """One process to start: its run's folder, its command and its expected duration.

    `others`: folder -> overrides of further runs that the process makes, with the same command.
    """

    folder: Path
    command: Sequence[str]
    overrides: Sequence[str]
    weight: float  # expected seconds; only their ratios count
    others: Mapping[Path, Sequence[str]] = field(default_factory=dict)

    @property
    def runs(self) -> dict[Path, Sequence[str]]:
        """Folder -> overrides of all its runs."""
        return {self.folder: self.overrides, **self.others}


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `exit` is negative for a signal, `reason` is empty if the run is done."""

    folder: Path
    exit: int
    reason: str
    seconds: float
    host: str = ""  # of a run that ended elsewhere

    @property
    def done(self) -> bool:
        """Whether the run left its summary.json."""
        return not self.reason

    @property
    def out_of_memory(self) -> bool:
        """Whether the run ended for lack of memory, by itself or killed by the kernel."""
        return self.exit == OutOfMemory.exit_code


class TimeOver(BaseException):
    """Raised when the time of a sweep is over.

    It is not an Exception, so that code which catches those lets it through.
    """


class Queue:
    """The works that have not ended, in order."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._waiting = list(works)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self) -> tuple[Work, IO[bytes] | None] | None:
        """Return the next work, perhaps with its log opened; None if there is none to take now."""
        return (self._waiting.pop(0), None) if self._waiting else None

    def ended_elsewhere(self) -> Iterable[tuple[Work, Outcome]]:
        """Drop and return the works that others have done, or failed to do."""
        return ()


class Watcher(Protocol):
    """Receives the events of `run_all`, to show them; `running` comes every POLL_SECONDS."""

    def started(self, work: Work) -> None: ...
    def running(self, works: Sequence[Work]) -> None: ...
    def ended(self, work: Work, outcome: Outcome) -> None: ...


@dataclass
class _Process:
    work: Work
    popen: subprocess.Popen[bytes] | Copy
    log: IO[bytes]
    alive: int  # its stdin is the other end, and reads end of file once we are gone
    start: float
    kills: int  # `memory_kills()` before the process started


def run_all(
    works: Sequence[Work],
    slots: int,
    ledger: Ledger,
    watcher: Watcher,
    until: float = math.inf,
    server: ForkServer | None = None,
    queue: Queue | None = None,
) -> list[Outcome]:
    """Run all works in order, at most `slots` at once. Return each run's outcome, in that order.

    A run is done if it left a summary.json, the last file that it writes; the exit code of its
    process does not matter then. On any exception, such as an interrupt, the processes get SIGTERM,
    after GRACE_SECONDS SIGKILL, and the exception is raised again. Raises TimeOver while runs are
    left when `time.monotonic()` reaches `until`. `server` starts the processes, if it lives.
    `queue` has the works if others take some of them.
    """
    queue = Queue(works) if queue is None else queue
    outcomes = dict.fromkeys(folder for work in works for folder in work.runs)
    active: list[_Process] = []
    try:
        while queue or active:
            if time.monotonic() >= until:
                raise TimeOver
            for work, outcome in queue.ended_elsewhere():
                outcomes[outcome.folder] = outcome
                watcher.ended(work, outcome)
            while len(active) < slots and (taken := queue.take()) is not None:
                work, log = taken
                try:
                    active.append(_start(work, server, log))
                except (OSError, UserError) as error:
                    for folder in work.runs:
                        outcome = _unstarted(folder, error)
                        outcomes[folder] = _ended(work, outcome, ledger, watcher)
                    continue
                pid = active[-1].popen.pid
                for folder, overrides in work.runs.items():
                    ledger.note(folder.name, "running", pid=pid, overrides=list(overrides))
                watcher.started(work)
            for process in [p for p in active if p.popen.poll() is not None]:
                active.remove(process)
                for outcome in _outcomes(process):
                    outcomes[outcome.folder] = _ended(process.work, outcome, ledger, watcher)
                _close(process)
            watcher.running([process.work for process in active])
            if active:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    active[0].popen.wait(POLL_SECONDS)
            elif queue:
                time.sleep(POLL_SECONDS)
    except BaseException:
        _stop(active, ledger)
        raise
    return [outcome for outcome in outcomes.values() if outcome is not None]


def open_log(work: Work) -> IO[bytes]:
    """Make the folders of the work, and open the file for what it prints."""
    for folder in work.runs:
        folder.mkdir(parents=True, exist_ok=True)
    return open_to_append(RunFolder(work.folder).console_file)


def _start(work: Work, server: ForkServer | None, log: IO[bytes] | None) -> _Process:
    log = open_log(work) if log is None else log
    kills = memory_kills()
    stdin, alive = os.pipe()
    try:
        popen = _popen(work, stdin, log, server)
    except BaseException:
        log.close()
        os.close(alive)
        raise
    finally:
        os.close(stdin)
    return _Process(work, popen, log, alive, time.monotonic(), kills)


def _popen(
    work: Work, stdin: int, log: IO[bytes], server: ForkServer | None
) -> subprocess.Popen[bytes] | Copy:
    """Start the process in a session of its own: Ctrl-C reaches only us; `_stop` passes it on."""
    if server is not None:
        with contextlib.suppress(OSError, ValueError):
            return server.start(work.command, stdin, log)
    return subprocess.Popen(
        work.command, stdin=stdin, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _close(process: _Process) -> None:
    process.log.close()
    os.close(process.alive)


def _unstarted(folder: Path, error: Exception) -> Outcome:
    return Outcome(folder, 7, f"could not be started: {error}", 0.0)


def _outcomes(process: _Process) -> list[Outcome]:
    process.popen.wait()
    seconds = time.monotonic() - process.start
    return [_outcome(process, folder, seconds) for folder in process.work.runs]


def _outcome(process: _Process, folder: Path, seconds: float) -> Outcome:
    code = process.popen.wait()
    if RunFolder(folder).done:
        return Outcome(folder, code, "", seconds)
    if code == 0:
        return Outcome(folder, 0, "ended without a summary.json", seconds)
    if code == -signal.SIGKILL and memory_kills() > process.kills:
        reason = "memory: killed by the kernel, because the machine ran out of memory"
        return Outcome(folder, OutOfMemory.exit_code, reason, seconds)
    if code < 0:
        return Outcome(folder, code, _signal_reason(-code), seconds)
    # A run that shares its process has a line of its own if it alone has failed.
    logs = (RunFolder(place).console_file for place in (folder, process.work.folder))
    reason = next(filter(None, map(_last_error, logs)), f"exit code {code}")
    return Outcome(folder, code, reason, seconds)


def memory_kills(counts: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", counts.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found is not None else 0


def _signal_reason(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = " (by a user, or for lack of memory)" if number == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def _last_error(log: Path) -> str:
    """Return the log's last `error:` line, or else its last exception line; "" without either."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1].removeprefix("error: ")
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return raised[-1] if raised else ""


def _ended(work: Work, outcome: Outcome, ledger: Ledger, watcher: Watcher) -> Outcome:
    facts = {"exit": outcome.exit, "seconds": round(outcome.seconds, 1)}
    if outcome.done:
        ledger.note(outcome.folder.name, "done", **facts)
    else:
        ledger.note(outcome.folder.name, "failed", **facts, reason=outcome.reason)
    watcher.ended(work, outcome)
    return outcome


def _stop(active: Sequence[_Process], ledger: Ledger) -> None:
    with _undisturbed():
        for process in active:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in active:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.popen.wait()
            for folder in process.work.runs:
                # The run may have finished before the signal.
                state = "done" if RunFolder(folder).done else "interrupted"
                ledger.note(folder.name, state, exit=process.popen.returncode)
            _close(process)


def _signal(process: _Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.popen.pid, number)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore further signals, so that a second Ctrl-C leaves no processes behind."""
    handlers: dict[int, Callable[..., object] | int | None] = {}
    for number in WORDS:
        with contextlib.suppress(ValueError):  # not in the main thread
            handlers[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
