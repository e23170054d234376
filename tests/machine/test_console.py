"""Text written for a person to read."""

import pytest

from gptattn.machine.console import format_duration


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
