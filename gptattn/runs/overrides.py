"""From runs back to the sweep command that makes them, or more of them with other seeds."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptattn import command
from gptattn.errors import UserError
from gptattn.runs.folder import RunFolder
from gptattn.settings.identity import flat, places, settings_key

NOT_TEXT = ("null", "true", "false", "nan", "inf")  # words that Hydra reads as other values


def sweep_command(runs: Sequence[Path], seeds: Sequence[int]) -> str | None:
    """Return the command whose sweep makes these runs and those at the other seeds.

    `runs`: one folder of each variant, in the sweep's folder. None if they differ in more than one
    override, if they depend on other runs or variants, or if the command would not make them here.
    """
    try:
        records = [RunFolder(run).read_settings() for run in runs]
        home = Path("outputs", records[0]["experiment_name"])
        if any(run.parent.resolve() != home.resolve() for run in runs):
            return None
        if any(record["match"] != "none" or record["init_from"] for record in records):
            return None
        typed = [dict(one.split("=", 1) for one in record["overrides"]) for record in records]
        keys = list(dict.fromkeys(key for own in typed for key in own))
        # One who left a setting out has its default.
        found = [
            {key: own[key] if key in own else _value_of(key, record) for key in keys}
            for own, record in zip(typed, records, strict=True)
        ]
        varied = [key for key in keys if len({own[key] for own in found}) > 1]
        if len(varied) != 1 or not all(map(_makes, found, records)):
            return None
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    key, shared = varied[0], [f"{key}={found[0][key]}" for key in keys if key != varied[0]]
    first, last = seeds[0], seeds[-1]
    together = [*seeds] == [*range(first, last + 1)] and len(seeds) > 3
    seed = f"range({first},{last + 1})" if together else ",".join(map(str, seeds))
    words = [f"{key}={','.join(own[key] for own in found)}", f"seed={seed}", *shared]
    return f"{command('train')} -m {shlex.join(words)}"


def _makes(overrides: Mapping[str, str], record: Mapping[str, Any]) -> bool:
    """Return whether the overrides, and the seed, make a run of the recorded settings here."""
    from gptattn.settings.compose import settings  # imports Hydra

    made = asdict(settings([f"{key}={value}" for key, value in overrides.items()]))
    made["seed"] = record["seed"]
    same = settings_key(made) == settings_key(record)
    return same and places(flat(made)) == places(flat({**record}))


def _value_of(key: str, record: Mapping[str, Any]) -> str:
    """Return a recorded setting in Hydra's grammar. Raises LookupError if there is none."""
    if key in record["choices"]:
        return _write(record["choices"][key])
    value: Any = record
    for name in key.split("."):
        value = value[name]
    return _write([*value] if key == "part" else value)


def _write(value: Any) -> str:
    """Return the value in Hydra's grammar. Raises ValueError for a table."""
    from gptattn.settings.layers import quote  # imports Hydra

    if isinstance(value, dict):
        raise ValueError("a table")
    if isinstance(value, list):
        return f"[{','.join(map(_write, value))}]"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower()  # also True, and 1E-05
    plain = re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in NOT_TEXT
    return value if plain else quote(value)
