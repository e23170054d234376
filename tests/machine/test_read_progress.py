"""What is slow says how far it is, and what is quick says nothing."""

import pytest

from gptattn.machine import read_progress
from gptattn.machine.read_progress import show_progress


@pytest.mark.parametrize(
    ("size", "shown"), [(100 * 10**6, "| 10.0M/100M ["), (0, "reading: 10.0MB [")]
)
def test_what_is_slow_says_how_far_it_is(
    size: int, shown: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read_progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(read_progress, "LOG_SECONDS", 0.0)
    with show_progress("reading", size) as advance:
        advance(10**7)
    said = capfd.readouterr().err
    assert "reading: " in said
    assert shown in said
