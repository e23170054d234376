"""The record of a sweep that went on until it was decided: its first seeds, in `until.json`.

Their spread decided how many more there are, so a report needs to know them.
"""

from pathlib import Path

import msgspec

from gptattn.machine import disk
from gptattn.machine.untrusted import read_bytes

NAME = "until.json"
MOST_BYTES = 100_000


class FirstStage(msgspec.Struct, frozen=True):
    """The seeds that a sweep began with, and the half of the interval that it is to reach, nats."""

    first: tuple[int, ...]
    half_width: float


def read_first_stage(sweep: Path) -> FirstStage | None:
    """Return the record in the sweep's folder; None without one that can be read."""
    try:
        found = msgspec.json.decode(read_bytes(sweep / NAME, MOST_BYTES), type=FirstStage)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    return found if found.first and 1e-6 <= found.half_width <= 100 else None


def write_first_stage(sweep: Path, stage: FirstStage) -> None:
    """Write the record. Raises DiskError if the disk refuses."""
    data = msgspec.json.format(msgspec.json.encode(stage), indent=1) + b"\n"
    disk.write_atomically(sweep / NAME, lambda file: file.write(data), sweep)
