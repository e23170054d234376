"""How many processors there are for this process, and who else uses them."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of a processor's line: idle, and waiting for a disk


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
