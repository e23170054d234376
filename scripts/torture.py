"""Breaks small runs in every way that docs/reliability.md promises something about.

`python scripts/torture.py` is the short form, of one or two minutes; `form=long` takes hours, and
`row=kill,save count=200` is two rows at length. It prints a line per row and ends with one line of
JSON; the exit code is 1 where a promise was broken, and `keep=true` keeps the runs.
"""

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tortures import disk, hang, memory, numbers, stops, sweeps, writers
from tortures.bench import VARIANTS, Bench, Result

from gptattn.cli.arguments import Names, parse
from gptattn.cli.ending import report
from gptattn.settings.values import check_choice


@dataclass(frozen=True)
class Row:
    """What breaks runs in one way, and how many times each form does it."""

    run: Callable[[Bench, int, Result], None]
    short: int  # how often; 0: in the long form alone
    long: int


ALL = Names("all")
SHORT_VARIANTS = ("gqa", "mha")  # each needs an undisturbed run; the tests resume all variants
ROWS = {
    "kill": Row(stops.kill, 4, 200),
    "save": Row(stops.save, 5, 500),
    "signal": Row(stops.stop, 2, 100),
    "corrupt": Row(stops.corrupt, 5, 100),
    "nan": Row(numbers.nan, 4, 20),
    "same": Row(numbers.same, 2, 20),
    "disk": Row(disk.full, 5, 20),
    "writers": Row(writers.writers, 4, 100),
    "hang": Row(hang.hang, 1, 3),
    "sweep": Row(sweeps.sweep, 0, 24),
    "memory": Row(memory.memory, 0, 20),
}


@dataclass(frozen=True)
class Settings:
    """The arguments of the command, as name=value."""

    row: Names = ALL  # or some of the rows
    form: str = "short"  # short | long
    count: int | None = None  # of each row; None: the form's
    seed: int = 1  # of the moments and of the damage
    keep: bool = False  # the folder with all runs


def torture(settings: Settings, folder: Path) -> list[Result]:
    """Run the chosen rows in `folder`, printing a line for each; return their results."""
    for name in settings.row:
        check_choice("row", name, [*ALL, *ROWS])
    check_choice("form", settings.form, ["short", "long"])
    variants = SHORT_VARIANTS if settings.form == "short" else VARIANTS
    results, bench = [], Bench(folder, settings.seed, variants)
    for name in ROWS if settings.row == ALL else settings.row:
        row, result = ROWS[name], Result(name)
        count = row.short if settings.form == "short" else row.long
        count = count if settings.count is None else settings.count
        if name == "disk" and not disk.can_mount(folder):
            print("disk: skipped: mounting the tmpfs that it fills needs root", flush=True)
            continue
        if count == 0:
            continue
        start = time.monotonic()
        try:
            row.run(bench, count, result)
        except Exception as error:  # what the other rows find must not be lost
            traceback.print_exc()
            result.check(False, f"the row itself failed: {error!r}")
        result.seconds = round(time.monotonic() - start, 1)
        results.append(result)
        facts = ", ".join(f"{fact}: {value:,}" for fact, value in result.facts.items())
        kept = "passed" if not result.broken else f"FAILED {len(result.broken)} times"
        print(f"{name}: {result.tried} tried, {kept}; {facts}; {result.seconds} s", flush=True)
        for line in result.broken:
            print(f"  {line}", flush=True)
    return results


def main() -> int:
    """Run the command; the exit code is 1 where a promise was broken."""
    try:
        settings = parse(Settings, sys.argv[1:])
        folder = Path(tempfile.mkdtemp(prefix="torture_", dir=os.environ.get("TMPDIR")))
        try:
            results = torture(settings, folder)
        finally:
            if settings.keep:
                print(folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)
    except Exception as error:
        return report(error)
    kept = not any(result.broken for result in results)
    print(json.dumps({"kept": kept, "rows": [asdict(result) for result in results]}))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
