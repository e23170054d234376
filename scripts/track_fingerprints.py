"""Checks by fingerprint whether today's code still gives the shipped results of track and battery.

Use `renew=true` after an intended change of the mathematics: a result that differs gets today's
fingerprint and a new version, and stays stale until you repeat its runs. A result without a
fingerprint gets one. A battery result also differs if its task's held-out rows have changed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

import msgspec

from gptattn.build.data import build_data
from gptattn.cli.arguments import option, parse, run_script
from gptattn.compare.battery import Result, read_tasks
from gptattn.compare.finished_runs import SHIPPED
from gptattn.compare.track import Entry, read_shipped, write_shipped
from gptattn.errors import ConfigError
from gptattn.settings.values import suggest
from gptattn.training.fingerprint import agrees, compute_fingerprint


@dataclass
class Arguments:
    """entry=all"""

    entry: str = option("all, or the name of one, such as 'mha part=[gate]'")
    renew: bool = option("true: replace fingerprints that differ", False)


def check(arguments: Sequence[str]) -> None:
    """Print whether each entry's fingerprint holds; write the renewed ones."""
    args = parse(Arguments, arguments)
    shipped = {
        experiment: read_shipped(folder, Result if experiment == "battery" else Entry)
        for experiment, folder in SHIPPED.items()
    }
    names = {entry.name for entries in shipped.values() for entry in entries}
    if args.entry not in ("all", *names):
        raise ConfigError("entry", f"{args.entry!r} is not shipped; {suggest(args.entry, names)}")
    tasks = read_tasks(lambda cfg: build_data(cfg).text_hash)
    rows = {name: task.facts["rows"] for name, task in tasks.items()}
    fingerprint_of = cache(lambda *overrides: compute_fingerprint(overrides))  # tasks share it
    for experiment, entries in shipped.items():
        for i, entry in enumerate(entries):
            if args.entry not in ("all", entry.name):
                continue
            fingerprint = fingerprint_of(*entry.list_overrides(experiment))
            same = not isinstance(entry, Result) or rows.get(entry.task) == entry.facts["rows"]
            status = "holds" if same and agrees(entry.fingerprint, fingerprint) else "differs"
            if not entry.fingerprint or (status == "differs" and args.renew):
                again = bool(entry.fingerprint)
                status += ", renewed"
                entries[i] = msgspec.structs.replace(
                    entry,
                    fingerprint=fingerprint,
                    version=entry.version + again,
                    stale=entry.stale or again,
                )
            what = entry.task if isinstance(entry, Result) else f"{entry.steps:,} steps"
            print(f"{experiment}: {entry.name}, {what}: {status}", flush=True)
        write_shipped(entries, SHIPPED[experiment])


def main() -> NoReturn:
    """Run the script."""
    sys.exit(run_script(check, Arguments))


if __name__ == "__main__":
    main()
