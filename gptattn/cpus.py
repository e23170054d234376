"""How many processors there are for this process. No torch: a sweep's plans need no more."""

import os


def usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
