"""Waiting threads sleep soon while others use the machine, and only then."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from gptattn.machine import waiting
from gptattn.machine.cpus import Usage
from gptattn.machine.waiting import WAITING, gentle_beside_others


class Looks(threading.Event):
    """An event that is set after so many calls of `wait`, which take no time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left < 0


def spares(monkeypatch: pytest.MonkeyPatch, usages: Sequence[Usage | None], threads: int) -> str:
    """Return when a process with these usages looks (.), starts teams (+) and ends them (-)."""
    told, seen = [], iter(usages)

    class Spare:
        def __init__(self, threads: int) -> None:
            told.append("+")

        def end(self) -> None:
            told.append("-")

    def look(cls: type[Usage]) -> Usage | None:
        told.append(".")
        return next(seen)

    monkeypatch.setattr(waiting, "_SleepingTeams", Spare)
    monkeypatch.setattr(waiting, "usable_cpus", lambda: 4)
    monkeypatch.setattr(Usage, "now", classmethod(look))
    waiting._watch(Looks(len(usages) - 1), threads)
    return "".join(told)


def seconds(*busy_and_own: tuple[float, float]) -> list[Usage | None]:
    """Usages one second apart, given the work done in between by all processes and by this one."""
    usages = [Usage(10.0, 100.0, 7.0)]
    for busy, own in busy_and_own:
        last = usages[-1]
        usages.append(Usage(last.clock + 1, last.busy + busy, last.own + own))
    return [*usages]


@pytest.mark.parametrize(
    ("busy", "own", "threads", "crowded"),
    [
        (4.0, 4.0, 4, False),
        (4.0, 3.6, 4, False),  # another process's short work
        (4.0, 3.0, 4, True),
        (4.0, 2.0, 2, False),  # there are processors for both
        (4.0, 1.2, 2, True),
    ],
)
def test_it_is_crowded_where_others_use_more_than_the_threads_leave(
    busy: float, own: float, threads: int, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = spares(monkeypatch, seconds((busy, own)), threads)
    assert found == ("..+-" if crowded else "..")


def test_threads_spin_again_when_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    full, quiet = (4.0, 2.0), (4.0, 4.0)
    assert spares(monkeypatch, seconds(quiet, full, full, quiet, full), 4) == "...+..-.+-"
    # The system no longer gives the usage.
    assert spares(monkeypatch, [*seconds(full), None, None], 4) == "..+.-"


@pytest.mark.parametrize("said", [None, *WAITING])
def test_what_the_user_says_of_waiting_threads_stays(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(said, "7")
    before = threading.active_count()
    with gentle_beside_others(threads=2):
        assert threading.active_count() - before == (said is None)
    with gentle_beside_others(threads=1):  # one thread waits for no other
        assert threading.active_count() == before


def test_a_spare_team_is_more_threads_than_processors_until_it_ends() -> None:
    code = (
        "import os, torch\n"
        "from gptattn.machine import waiting\n"
        "os.sched_setaffinity(0, set(list(os.sched_getaffinity(0))[:2]))\n"
        "torch.set_num_threads(2)\n"
        "torch.zeros(1 << 20).add_(1)\n"  # the process's own team
        "def threads(): return len(os.listdir('/proc/self/task'))\n"
        "own, made = threads(), []\n"
        "for cpus in (2, 3):\n"
        "    waiting.usable_cpus = lambda: cpus\n"
        "    spare = waiting._SleepingTeams(2)\n"
        "    for team in spare.ready: team.wait()\n"
        "    made.append(threads() - own)\n"
        "    spare.end()\n"
        "    while threads() > own: os.sched_yield()\n"  # the system takes a moment
        "print(*made)\n"
    )
    plain = {k: v for k, v in os.environ.items() if "OMP" not in k}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=plain
    )
    # Each team has the thread that starts it and one more.
    assert done.stdout == "2 4\n"
