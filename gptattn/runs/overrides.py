"""What was typed for a run, and from runs back to the sweep command that makes more of them."""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from gptattn import command
from gptattn.errors import UserError
from gptattn.runs.folder import LOADER, RunFolder
from gptattn.settings.config import CONF, Meaning
from gptattn.settings.identity import flat, meaning, places, result_settings, settings_key

# What makes the attention, in the order of a row's name.
ATTENTION = ("attn", "recipe", "pattern", "layers", "part", "position")
NOT_TEXT = ("null", "true", "false", "nan", "inf")  # words that Hydra reads as other values


def read_typed(overrides: Sequence[str]) -> dict[str, str]:
    """Return what was typed, by setting, without what changes no result."""
    words = (one.lstrip("+").replace(" ", "").partition("=") for one in overrides)
    return {
        key: value
        for key, _, value in words
        if key.partition(".")[0] in ATTENTION or meaning(key) not in (Meaning.BOUND, Meaning.VIEW)
    }


def value_of(key: str, choices: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Return the file chosen in a group, or a setting's value, or all that is below it."""
    below = (f"{k}={v}" for k, v in settings.items() if k.startswith((f"{key}.", f"{key}[")))
    return choices.get(key) or settings.get(key) or " ".join(below)


def leave_out(
    key: str, overrides: Sequence[str], choices: Mapping[str, str], told: Collection[str]
) -> tuple[str, ...]:
    """Return the overrides on which the default of a setting may depend.

    Left out are the setting, the attention, and all settings in `told`, but no choices of files: of
    runs that differ in nothing else the default is the same.
    """

    def stays(override: str) -> bool:
        name = override.lstrip("+").partition("=")[0]
        # Others may have made the record: it must not tell Hydra where to search.
        of_model = name == "recipe" or name.partition(".")[0] not in (*ATTENTION, "hydra")
        return of_model and name != key and (name in choices or name not in told)

    return tuple(filter(stays, overrides))


def find_default(key: str, overrides: tuple[str, ...], choices: Mapping[str, str]) -> str | None:
    """Return the value, as `value_of` does, that a setting has if it is not typed; None: unknown.

    A setting of an attention, position or part has its file's default. For others, Hydra composes
    `overrides`, those of `leave_out`, which takes 0.2 s.
    """
    group, _, below = key.partition(".")
    if below and group in ("attn", "position", "part"):
        part = f".{below.partition('.')[0]}" if group == "part" else ""
        return _read_file(group, part[1:] or choices.get(group, ""), group + part).get(key)
    made = _compose(overrides)
    return made and value_of(key, *made)


@cache
def _read_file(group: str, choice: str, place: str) -> dict[str, str]:
    file = CONF / group / f"{choice}.yaml"
    found = yaml.load(file.read_text(encoding="utf-8"), LOADER) if file.is_file() else {}
    return flat(found, place)


@lru_cache(maxsize=256)
def _compose(overrides: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]] | None:
    """Return the choices and settings of a run with these overrides; None if it is refused."""
    from gptattn.settings.compose import settings  # imports Hydra

    try:
        made = settings(overrides)
    except UserError:
        return None
    return made.choices, result_settings(flat(asdict(made)))


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
