"""How the threads of a run wait for each other, depending on who else uses the machine."""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

from gptattn.machine.cpus import Usage, usable_cpus

LOOK_SECONDS = 1.0
# Waiting threads sleep instead of spinning once other programs need this many more processors than
# we leave free. Less is measurement noise.
CROWDED = 0.5
# Environment variables by which a user sets how OpenMP threads wait.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
PARALLEL_SIZE = 1 << 20  # values in a tensor, enough for torch to use every thread


@contextlib.contextmanager
def gentle_beside_others(threads: int) -> Iterator[None]:
    """Let waiting threads sleep soon while others leave too few processors for these `threads`.

    A waiting OpenMP thread looks for work for milliseconds before it sleeps. On a quiet machine
    that makes small models a third faster; on a full one it takes the processor from the very
    thread that it waits for. libgomp looks only briefly while it has more threads than there are
    processors (its `gomp_throttled_spin_count_var`); `_SleepingTeams` adds the threads for that.
    It has no effect on other OpenMP libraries. If the user has set one of WAITING, nothing is
    changed.
    """
    user_set = any(name in os.environ for name in WAITING)
    if threads == 1 or user_set or Usage.now() is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(over, threads), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(over: threading.Event, threads: int) -> None:
    before, teams = Usage.now(), None
    while not over.wait(LOOK_SECONDS):
        now = Usage.now()
        if before is None or now is None:
            break
        others = (now.busy - before.busy) - (now.own - before.own)
        left = usable_cpus() - threads
        crowded = others > (left + CROWDED) * (now.clock - before.clock)
        before = now
        if crowded and teams is None:
            teams = _SleepingTeams(threads)
        elif teams is not None and not crowded:
            teams.end()
            teams = None
    if teams is not None:
        teams.end()


class _SleepingTeams:
    """Teams of sleeping threads, which give libgomp more threads than there are processors."""

    def __init__(self, threads: int) -> None:
        missing = usable_cpus() - threads + 1
        count = -(-missing // (threads - 1))  # each team adds all its threads but one
        self._over = threading.Event()
        self.ready = [threading.Event() for _ in range(count)]
        self._teams = [
            threading.Thread(target=self._sleep, args=(ready,), daemon=True) for ready in self.ready
        ]
        for team in self._teams:
            team.start()

    def _sleep(self, ready: threading.Event) -> None:
        torch.zeros(PARALLEL_SIZE).add_(1.0)  # starts the team, which lives as long as this thread
        ready.set()
        self._over.wait()

    def end(self) -> None:
        self._over.set()
        for team in self._teams:
            team.join()
