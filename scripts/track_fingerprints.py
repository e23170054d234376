"""Checks the attention track's shipped results against today's code, by their fingerprints.

With `renew=true` a result whose fingerprint differs gets today's and a new version, and is stale
until its runs have been made again: for a change of the mathematics that is meant. A result without
a fingerprint gets one.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from gptattn.cli.arguments import option, parse, run_script
from gptattn.compare.finished_runs import SHIPPED
from gptattn.compare.track import read_shipped, write_shipped
from gptattn.errors import ConfigError
from gptattn.settings.values import suggest
from gptattn.training.fingerprint import agrees, compute_fingerprint


@dataclass
class Arguments:
    """entry=all"""

    entry: str = option("all, or the name of one, such as 'mha part=[gate]'")
    renew: bool = option("true: write fingerprints that differ", False)


def check(arguments: Sequence[str]) -> None:
    """Print each entry with what its fingerprint says; write those to be renewed."""
    args = parse(Arguments, arguments)
    names = {entry.name for folder in SHIPPED.values() for entry in read_shipped(folder)}
    if args.entry not in ("all", *names):
        raise ConfigError("entry", f"{args.entry!r} is not shipped; {suggest(args.entry, names)}")
    for experiment, folder in SHIPPED.items():
        entries = read_shipped(folder)
        for i, entry in enumerate(entries):
            if args.entry not in ("all", entry.name):
                continue
            found = compute_fingerprint(entry.list_overrides(experiment))
            said = "holds" if agrees(entry.fingerprint, found) else "differs"
            if not entry.fingerprint or (said == "differs" and args.renew):
                again = bool(entry.fingerprint)
                said += ", renewed"
                entries[i] = msgspec.structs.replace(
                    entry,
                    fingerprint=found,
                    version=entry.version + again,
                    stale=entry.stale or again,
                )
            print(f"{experiment}: {entry.name} after {entry.steps:,} steps: {said}", flush=True)
        write_shipped(entries, folder)


def main() -> NoReturn:
    """Run the script."""
    sys.exit(run_script(check, Arguments))


if __name__ == "__main__":
    main()
