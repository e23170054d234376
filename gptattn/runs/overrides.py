"""From the records of runs back to a command that would make them, and more of them.

Each command is checked: its overrides compose to the recorded settings, or there is none.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from gptattn import command
from gptattn.errors import UserError
from gptattn.runs.folder import RunFolder
from gptattn.settings.identity import NAMED, flat, meaning, places, settings_key

# A command must repeat these although they change no result: they say where and how runs are made.
OF_SWEEP = ("experiment_name", "allow_targets", "sweep.jobs", "checks")
# Not settings of their own: `choices`, `pattern` and `part` stand for them.
DERIVED = ("choices", "pattern_attn", "match_attn", "match_made", "seed")
NOT_TEXT = ("null", "true", "false", "nan", "inf")  # words that Hydra reads as other values

Overrides = dict[str, str]


def sweep_command(runs: Sequence[Path], seeds: Sequence[int]) -> str | None:
    """Return the command whose sweep makes these runs and those at the other seeds.

    `runs`: one folder of each variant, in the sweep's folder. None if they differ in more than one
    override, or if no overrides are known that make them here.
    """
    try:
        records = [RunFolder(run).read_settings() for run in runs]
        home = Path("outputs", records[0]["experiment_name"])
        if any(run.parent.resolve() != home.resolve() for run in runs):
            return None
        found = [_find_overrides(record) for record in records]
        keys = list(dict.fromkeys(key for own in found for key in own))
        varied = [key for key in keys if len({own.get(key) for own in found}) > 1]
        if len(varied) != 1:
            return None
        (key,) = varied
        values = [
            own.get(key) or _value_of(key, record)
            for own, record in zip(found, records, strict=True)
        ]
        shared = {name: value for name, value in found[0].items() if name != key}
        for value, record in zip(values, records, strict=True):
            _check(shared | {key: value}, record)
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    first, last = seeds[0], seeds[-1]
    together = [*seeds] == [*range(first, last + 1)] and len(seeds) > 3
    seed = f"range({first},{last + 1})" if together else ",".join(map(str, seeds))
    words = [f"{key}={','.join(values)}", f"seed={seed}", *_arguments(shared)]
    return f"{command('train')} -m {shlex.join(words)}"


def _find_overrides(record: Mapping[str, Any]) -> Overrides:
    """Return overrides that compose to the recorded settings. Raises ValueError if none do."""
    if record["match"] != "none" or record["init_from"] is not None:
        raise ValueError("depends on other variants or runs")
    found: Overrides = {}
    if record["pattern"] is not None:
        found["pattern"] = _value_of("pattern", record)
    if record["part"]:
        found["part"] = _value_of("part", record)
    # What a block or a data set chooses for other groups need not be given.
    for group in sorted(record["choices"], key=lambda group: group not in ("block", "data")):
        if group == "attn" and "pattern" in found:
            continue
        if _compose(*_arguments(found))["choices"][group] != record["choices"][group]:
            found[group] = _value_of(group, record)
    usual = _leaves(_compose(*_arguments(found)))
    for key, value in _leaves(record).items():
        counts = meaning(key) in NAMED or key in OF_SWEEP
        derived = key.partition(".")[0] in DERIVED or key in ("pattern", "part")
        if counts and not derived and (key not in usual or usual[key] != value):
            found[key] = _write(value)
    _check(found, record)
    return found


def _check(overrides: Overrides, record: Mapping[str, Any]) -> None:
    """Raise ValueError unless the overrides, and the seed, make a run of the recorded settings."""
    made = _compose(*_arguments(overrides)) | {"seed": record["seed"]}
    if settings_key(made) != settings_key(record) or places(flat(made)) != places(flat({**record})):
        raise ValueError("the overrides make another run")


@cache
def _compose(*overrides: str) -> dict[str, Any]:
    from gptattn.settings.compose import settings  # imports Hydra

    return asdict(settings(overrides))


def _arguments(overrides: Overrides) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]


def _value_of(key: str, record: Mapping[str, Any]) -> str:
    if key in record["choices"]:
        return _write(record["choices"][key])
    return _write([*record["part"]] if key == "part" else _leaves(record)[key])


def _leaves(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name; lists are values."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        deep = isinstance(value, dict) and value
        found |= _leaves(value, f"{prefix}{key}.") if deep else {f"{prefix}{key}": value}
    return found


def _write(value: Any) -> str:
    """Return the value in Hydra's grammar. Raises ValueError for a table."""
    from gptattn.settings.compose import quote  # imports Hydra

    if isinstance(value, dict):
        raise ValueError("a table")
    if isinstance(value, list):
        return f"[{','.join(map(_write, value))}]"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower()  # also True, and 1E-05
    plain = re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in NOT_TEXT
    return value if plain else quote(value)
