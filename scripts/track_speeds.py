"""Measures the speed of the attention track's entries, and writes it into their files.

The entries' training steps take turns on one thread, in a new random order each round. The speeds
of the entries' own runs can't be compared: they shared a machine, or ran on several.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch
from measuring.tables import ratio, set_threads, spread

from gptattn.cli.arguments import Count, option, parse, run_script
from gptattn.compare.finished_runs import SHIPPED
from gptattn.compare.track import BASELINE, Entry, read_shipped, write_shipped
from gptattn.machine.device import device_name
from gptattn.settings.compose import settings
from gptattn.training.preflight import PreparedRun, preflight
from gptattn.training.speed import interleave, train_steps

STEPS = 3  # per round


def prepare(entry: Entry, experiment: str) -> PreparedRun:
    """Return the entry's run with its width matched, ready to train."""
    overrides = [f"experiment={experiment}", f"budget.steps={entry.steps}", *entry.typed]
    return preflight(settings(overrides), shapes_only=True)


@dataclass(frozen=True)
class Arguments:
    """folder=benchmarks/track"""

    folder: Path = option("folder of the entries", SHIPPED["track"])
    rounds: Count = option("turns of each entry", 7)


def run(arguments: Sequence[str]) -> None:
    """Time the entries in turns; print and write their speeds."""
    args = parse(Arguments, arguments)
    set_threads(1)
    entries = read_shipped(args.folder, Entry)
    unique = {entry.name: entry for entry in entries}
    runs = {name: prepare(entry, args.folder.name) for name, entry in unique.items()}
    turns = {name: partial(train_steps, one, STEPS) for name, one in runs.items()}
    seconds = interleave(turns, args.rounds)
    for name, values in sorted(seconds.items(), key=lambda item: median(item[1])):
        speed = ratio(seconds[BASELINE], values)
        print(f"{name}: {speed:.3f} times {BASELINE}'s speed, ± {spread(values):.1%}")
    machine = device_name(torch.device("cpu"))
    speeds = {
        name: [round(base / one, 4) for base, one in zip(seconds[BASELINE], values, strict=True)]
        for name, values in seconds.items()
    }
    write_shipped(
        [msgspec.structs.replace(e, speeds=speeds[e.name], machine=machine) for e in entries],
        args.folder,
    )


if __name__ == "__main__":
    sys.exit(run_script(run, Arguments))
