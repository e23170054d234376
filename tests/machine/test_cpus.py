"""How much the processors are used, and by whom."""

import os
from pathlib import Path

import pytest

from gptattn.machine import cpus
from gptattn.machine.cpus import Usage

FIRST = min(os.sched_getaffinity(0))
# user nice system idle iowait irq softirq steal guest guest_nice, in hundredths of a second
STAT = f"""cpu  9 9 9 9 9 9 9 9 9 9
cpu{FIRST} 100 10 40 5000 600 3 2 45 70 0
cpu9999 7000 7000 7000 0 0 0 0 0 0 0
intr 1 2 3
"""


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
