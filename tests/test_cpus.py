"""How threads wait is said before torch is loaded, and only where others use the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptattn import cpus
from gptattn.cpus import WAITING, Usage, wait_gently_beside_others

FIRST = min(os.sched_getaffinity(0))
# user nice system idle iowait irq softirq steal guest guest_nice, in hundredths of a second
STAT = f"""cpu  9 9 9 9 9 9 9 9 9 9
cpu{FIRST} 100 10 40 5000 600 3 2 45 70 0
cpu9999 7000 7000 7000 0 0 0 0 0 0 0
intr 1 2 3
"""


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def used(monkeypatch: pytest.MonkeyPatch, clock: float, busy: float, own: float) -> None:
    monkeypatch.setattr(Usage, "now", classmethod(lambda cls: cls(clock, busy, own)))


def test_work_is_that_of_this_process_own_processors_and_guests_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(cpus, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    now = Usage.now()
    assert now is not None
    assert now.busy == pytest.approx(2.0)  # 100 + 10 + 40 + 3 + 2 + 45 hundredths
    monkeypatch.setattr(cpus, "STAT", tmp_path / "none")
    assert Usage.now() is None


@pytest.mark.parametrize(
    ("busy", "own", "gently"),
    [(0.5, 0.5, False), (0.6, 0.4, False), (1.4, 0.4, True), (2.0, 1.0, True), (1.0, 1.0, False)],
)
def test_threads_wait_gently_where_others_use_more_than_is_left(
    busy: float, own: float, gently: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 4)
    before = Usage(clock=10.0, busy=100.0, own=7.0)
    used(monkeypatch, clock=11.0, busy=102.0 + busy, own=7.0 + own)
    wait_gently_beside_others(before, threads=2)  # leaves two for others
    assert ("OMP_WAIT_POLICY" in os.environ) == gently
    os.environ.pop("OMP_WAIT_POLICY", None)
    used(monkeypatch, clock=11.0, busy=100.0 + busy, own=7.0 + own)
    wait_gently_beside_others(before, threads=None)
    assert ("OMP_WAIT_POLICY" in os.environ) == gently


@pytest.mark.parametrize("name", WAITING)
def test_what_the_user_says_of_waiting_threads_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    used(monkeypatch, clock=11.0, busy=200.0, own=0.0)
    wait_gently_beside_others(Usage(10.0, 100.0, 0.0), None)
    assert dict(os.environ) == before


def test_the_command_looks_around_before_torch_is_loaded() -> None:
    code = (
        "import os, sys\n"
        "from gptattn import cli\n"
        "from gptattn.cpus import Usage\n"
        "assert 'torch' not in sys.modules\n"
        "cli.BEGAN = Usage(0.0, -1e9, 0.0)\n"  # the machine was full since
        "try:\n    cli.check_job(['data=text'])\n"
        "except Exception as error:\n    assert error.field == 'data.path', error\n"
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
    )
    plain = {k: v for k, v in os.environ.items() if k not in WAITING}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=plain
    )
    assert done.stdout == "passive True\n"
