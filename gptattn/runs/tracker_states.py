"""What each tracker has of a run, so that a resumed run goes on there and sends no row twice.

A tracker's rows are those of metrics.jsonl. A resumed run drops its newest rows from the file and
makes them again, but a tracker keeps what it was sent.
"""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from gptattn.machine.disk import write_atomically
from gptattn.machine.untrusted import read_bytes
from gptattn.runs.folder import RunFolder

STATE_BYTES = 10_000_000  # the most that is read; a row sent ahead takes about 25 bytes
NO_METRICS = ("step", "time")

Sent = tuple[int, str]  # the step of a row, and the name of its first metric


class TrackerState(msgspec.Struct):
    """What a tracker has of a run. `rows` None: all rows of metrics.jsonl, however many."""

    settings: dict[str, Any] = {}  # of the tracker; with others, the run begins anew there
    id: str | None = None  # of the run, as the tracker calls it
    rows: int | None = 0  # it has the first so many rows of metrics.jsonl,
    ahead: list[Sent] = []  # and of the later ones these


def read_state(folder: RunFolder, name: str, settings: dict[str, Any]) -> TrackerState:
    """Return what this tracker, with these settings, has of the run; nothing without a record."""
    try:
        text = read_bytes(folder.tracker_file(name), STATE_BYTES)
        state = msgspec.json.decode(text, type=TrackerState)
    except (OSError, ValueError, msgspec.MsgspecError):
        state = None
    same = state is not None and state.settings == settings
    return state if state is not None and same else TrackerState(settings)


def write_state(folder: RunFolder, name: str, state: TrackerState) -> None:
    """Write what this tracker has of the run."""
    text = msgspec.json.encode(state)
    write_atomically(folder.tracker_file(name), lambda file: file.write(text), folder.path)


def note_rows_that_go(folder: RunFolder, kept: int) -> None:
    """Note which trackers have rows after the first `kept`, before a resumed run drops them."""
    for file in sorted(folder.trackers.glob("*.json")):
        try:
            state = msgspec.json.decode(read_bytes(file, STATE_BYTES), type=TrackerState)
        except (OSError, ValueError, msgspec.MsgspecError):
            continue  # it begins anew
        later = [*metric_rows(folder, kept, state.rows)]
        ahead = {*state.ahead, *(sent(step, metrics) for _, step, metrics in later)}
        state.rows = kept if state.rows is None else min(state.rows, kept)
        state.ahead = sorted(ahead)
        write_state(folder, file.stem, state)


def metric_rows(
    folder: RunFolder, start: int, stop: int | None
) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield (number of the row, from 1 on, step, metrics) of the rows from `start` to `stop`.

    Rows without a number, and lines that are no rows, are left out.
    """
    try:
        file = folder.rows_file.open("rb")
    except FileNotFoundError:
        return
    with file:
        for count, line in enumerate(islice(file, start, stop), start + 1):
            try:
                row = json.loads(line)
                step, found = int(row["step"]), numbers(row)
            except (ValueError, LookupError, TypeError, AttributeError):
                continue
            if found:
                yield count, step, found


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Select a row's metrics: its texts, its step and its time are none."""
    return {
        name: value
        for name, value in row.items()
        if name not in NO_METRICS and isinstance(value, int | float)
    }


def sent(step: int, metrics: dict[str, float]) -> Sent:
    """Return what tells this row from all others of its run."""
    return step, next(iter(metrics))
