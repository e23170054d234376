"""How many processors there are for this process, who else uses them, and how its threads wait.

No torch: what is said of threads must be said before torch is loaded.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of a processor's line: idle, and waiting for a disk
# Processors by which it must be too crowded before threads wait gently; noise is less.
CROWDED = 0.5
# By which a user says how threads of OpenMP wait.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def usable_cpus() -> int:
    return len(_usable())


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class Usage:
    """Seconds so far: by the clock, of this process's processors at work, and of its own work."""

    clock: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> "Usage | None":
        """None where the system does not tell (it is not Linux)."""
        try:
            lines = [line.split() for line in STAT.read_text().splitlines()]
            columns = [line[1:9] for line in lines if line[0][3:].isdecimal()]
            numbers = [int(line[0][3:]) for line in lines if line[0][3:].isdecimal()]
            # Of the columns behind these the guests' are in the first one already.
            busy = sum(
                sum(int(value) for i, value in enumerate(values) if i not in IDLE)
                for number, values in zip(numbers, columns, strict=True)
                if number in _usable()
            )
            return cls(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time())
        except (OSError, ValueError, IndexError):
            return None


def wait_gently_beside_others(before: Usage | None, threads: int | None) -> None:
    """Have threads that wait sleep at once, where others leave too few processors for all of them.

    By what others have used since `before`; `threads` None: one a processor. Call it before torch
    is loaded: its OpenMP reads this once. Threads that wait look for work for milliseconds before
    they sleep. On a quiet machine that makes small models a third faster; on a full one they keep
    from work the very thread that they wait for. What the user has set stays.
    """
    now = Usage.now()
    if before is None or now is None or any(name in os.environ for name in WAITING):
        return
    others = (now.busy - before.busy) - (now.own - before.own)
    left = usable_cpus() - (threads or usable_cpus())
    if others > (left + CROWDED) * (now.clock - before.clock):
        os.environ["OMP_WAIT_POLICY"] = "passive"
