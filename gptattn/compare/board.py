"""Writes the comparison as TensorBoard runs: mean, lower and upper line of each variant."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.record_writer import RecordWriter

from gptattn.compare.bands import section_bands, start_time
from gptattn.compare.curves import Curves, Floats
from gptattn.compare.files import BOARD_MARK, remove_former_board
from gptattn.compare.results import Comparison, Section
from gptattn.machine.disk import write_atomically

TAGS = {
    "val/loss": ("val", "loss"),
    "val/bits_per_byte": ("val", "bits"),
    "train/loss": ("train", "loss"),
}


Series = tuple[str, Floats, Floats, Floats]  # tag, steps, seconds, values


def write_board(comparison: Comparison, folder: Path) -> None:
    """Write up to three TensorBoard runs per row below `folder`, replacing an earlier report's.

    The parent of `folder` must exist.
    """
    folder.mkdir(exist_ok=True)
    remove_former_board(folder)
    taken: set[Path] = set()
    for section in comparison.sections:
        place = folder / _file_name(section.title) if section.title else folder
        for row, lines in _section_lines(section, comparison.curves).items():
            name, count = _file_name(row), 2
            while place / name in taken:
                name, count = f"{_file_name(row)} {count}", count + 1
            taken.add(place / name)
            began = start_time(section, comparison.curves, row)
            for line, series in lines.items():
                _write_events(folder, place / f"{name} {line}", began, series)


def _file_name(name: str) -> str:
    """Return `name` as a valid folder name; a setting's value may contain slashes."""
    return re.sub(r"[^\w.,=+()\- ]", "_", name)[:120].strip(" .") or "_"


def _section_lines(
    section: Section, curves: Mapping[Path, Curves]
) -> dict[str, dict[str, list[Series]]]:
    """Return row name -> line (mean, lower, upper) -> one series per tag."""
    found: dict[str, dict[str, list[Series]]] = {}
    for tag, (kind, value) in TAGS.items():
        seconds = section_bands(section, curves, kind, "step", "seconds")
        for row, band in section_bands(section, curves, kind, "step", value).items():
            # The mean time at which each step was taken makes TensorBoard's RELATIVE axis right.
            since = np.interp(band.x, seconds[row].x, seconds[row].mean)
            lines = found.setdefault(row, {})
            for line, values in (("mean", band.mean), ("lower", band.low), ("upper", band.high)):
                if values is not None:
                    lines.setdefault(line, []).append((tag, band.x, since, values))
    return found


def _write_events(root: Path, folder: Path, began: float, series: Sequence[Series]) -> None:
    # TensorBoard's own writer starts a thread and puts the host name into the file name.
    file = folder / f"events.out.tfevents.{int(time.time())}{BOARD_MARK}"

    def write(target: Any) -> None:
        writer = RecordWriter(target)
        writer.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
        for tag, steps, since, values in series:
            for x, moment, value in zip(steps, since, values, strict=True):
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
                event = Event(
                    wall_time=began + float(moment), step=round(float(x)), summary=summary
                )
                writer.write(event.SerializeToString())

    write_atomically(file, write)
