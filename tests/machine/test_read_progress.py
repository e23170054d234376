"""What is slow says how far it is, and what is quick says nothing."""

import io

import pytest
from rich.console import Console

from gptattn.machine import read_progress
from gptattn.machine.read_progress import show_progress, with_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the clock shows, to be changed."""
    now = [100.0]
    monkeypatch.setattr(read_progress.time, "monotonic", lambda: now[0])
    return now


def test_what_is_done_in_two_seconds_says_nothing(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    with show_progress("reading", 10**6) as advance:
        clock[0] += 1.9
        advance(10**6)
    assert capfd.readouterr().err == ""


def test_a_line_now_and_then_says_how_far_it_is(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    with show_progress("reading", 100 * 10**6) as advance:
        for _ in range(10):
            clock[0] += 4.0
            advance(10 * 10**6)
    assert capfd.readouterr().err.splitlines() == [
        "reading: 10 of 100 MB, 36 s left, 2.5 MB/s",
        "reading: 40 of 100 MB, 24 s left, 2.5 MB/s",
        "reading: 70 of 100 MB, 12 s left, 2.5 MB/s",
        "reading: 100 of 100 MB, 2.5 MB/s",
    ]


def test_it_says_what_it_is_at_before_anything_is_done(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    with show_progress("reading", 10**7) as advance:
        for size in (0, 0, 0, 10**7):
            clock[0] += 2.5
            advance(size)
    assert capfd.readouterr().err == "reading: 0 of 10 MB, 0.0 MB/s\n"


def test_without_a_known_size_it_says_what_is_done(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    with show_progress("reading", 0) as advance:
        clock[0] += 5.0
        advance(10**7)
    assert capfd.readouterr().err == "reading: 10 MB, 2.0 MB/s\n"


def test_a_terminal_gets_a_bar(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr(
        read_progress, "Console", lambda stderr: Console(file=shown, force_terminal=True, width=90)
    )
    with show_progress("reading", 10**8) as advance:
        clock[0] += 4.0
        advance(10**7)
    assert "reading" in shown.getvalue()
    assert "10.0/100.0 MB" in shown.getvalue()


def test_each_piece_is_told_when_it_is_done() -> None:
    sizes: list[int] = []
    pieces = with_progress(["one", "three"], sizes.append)
    assert next(pieces) == "one"
    assert sizes == []
    assert next(pieces) == "three"
    assert sizes == [3]
