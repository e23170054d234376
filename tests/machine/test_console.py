"""Text written for a person to read."""

import pytest

from gptattn.machine import read_progress
from gptattn.machine.console import format_duration
from gptattn.machine.read_progress import show_progress


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (89, "89 s"),
        (150, "2 min"),
        (12_000, "3 h 20 min"),
        (47 * 3600, "47 h 0 min"),
        (48 * 3600, "2 d 0 h"),
        (452_611, "5 d 6 h"),
    ],
)
def test_a_span_of_time_reads_as_a_person_says_it(seconds, shown):
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(100 * 10**6, "| 10.0M/100M ["), (0, "reading: 10.0MB [")]
)
def test_slow_work_shows_its_progress(size, shown, monkeypatch, capfd):
    monkeypatch.setattr(read_progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(read_progress, "LOG_SECONDS", 0.0)
    with show_progress("reading", size) as advance:
        advance(10**7)
    said = capfd.readouterr().err
    assert "reading: " in said
    assert shown in said
