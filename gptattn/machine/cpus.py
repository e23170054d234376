"""How many processors this process may use, and how much they are used."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of a processor's line: idle and iowait


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(_usable())


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class Usage:
    """Counters in seconds; the difference between two readings is the usage in between."""

    clock: float  # wall clock
    busy: float  # work of all processes on the processors that this process may use
    own: float  # work of this process

    @classmethod
    def now(cls) -> "Usage | None":
        """Read the counters; None on a system without them (not Linux)."""
        try:
            lines = [line.split() for line in STAT.read_text().splitlines()]
            columns = [line[1:9] for line in lines if line[0][3:].isdecimal()]
            numbers = [int(line[0][3:]) for line in lines if line[0][3:].isdecimal()]
            # Without the guest columns after these eight: user and nice include them already.
            busy = sum(
                sum(int(value) for i, value in enumerate(values) if i not in IDLE)
                for number, values in zip(numbers, columns, strict=True)
                if number in _usable()
            )
            return cls(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time())
        except (OSError, ValueError, IndexError):
            return None
