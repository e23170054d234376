"""The overrides that were typed for a run, and the defaults of the settings in them."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path

import yaml

from gptattn.errors import UserError
from gptattn.runs.folder import LOADER
from gptattn.settings.config import CONF, Effect, TrainConfig
from gptattn.settings.identity import effect_of, flat, result_settings

# What makes the attention, in the order of a row's name.
ATTENTION = ("attn", "recipe", "pattern", "layers", "part", "position")


def read_typed(overrides: Sequence[str]) -> dict[str, str]:
    """Return the typed values by setting, without those that cannot change the result."""
    words = (one.lstrip("+").replace(" ", "").partition("=") for one in overrides)
    return {
        key: value
        for key, _, value in words
        if key.partition(".")[0] in ATTENTION or effect_of(key) not in (Effect.FIXED, Effect.VIEW)
    }


def value_of(key: str, choices: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Return the file chosen in a group, a setting's value, or all values below it."""
    # What is typed as layers.NAME.attn.gqa.window is kept as layers.NAME.attn.window.
    key = re.sub(r"^(layers\.[^.]+\.(?:attn|position))\.[^.]+", r"\1", key)
    below = (f"{k}={v}" for k, v in settings.items() if k.startswith((f"{key}.", f"{key}[")))
    return choices.get(key) or settings.get(key) or " ".join(below)


def trim_overrides(
    key: str, overrides: Sequence[str], choices: Mapping[str, str], varied: Collection[str]
) -> tuple[str, ...]:
    """Return the overrides on which the default of a setting may depend.

    These leave out the setting, the attention, and settings in `varied` except choices of files.
    Runs that differ in nothing else share the default.
    """

    def stays(override: str) -> bool:
        name = override.lstrip("+").partition("=")[0]
        # The record may be someone else's: it must not tell Hydra where to search.
        of_model = name == "recipe" or name.partition(".")[0] not in (*ATTENTION, "hydra")
        return of_model and name != key and (name in choices or name not in varied)

    return tuple(filter(stays, overrides))


def find_default(key: str, overrides: tuple[str, ...], choices: Mapping[str, str]) -> str | None:
    """Return the value, as `value_of` does, of a setting that is not typed; None: unknown.

    A setting of an attention, position or part has its file's default. For others, Hydra composes
    `overrides`, which `trim_overrides` returned; this takes 0.2 s.
    """
    group, _, below = key.partition(".")
    if below and group in ("attn", "position", "part"):
        part = f".{below.partition('.')[0]}" if group == "part" else ""
        return _read_file(group, part[1:] or choices.get(group, ""), group + part).get(key)
    composed = _compose(overrides)
    return composed and value_of(key, *composed)


def leave_out_defaults(cfg: TrainConfig, overrides: Sequence[str]) -> list[str]:
    """Return a run's overrides without those that only repeat a default."""
    typed = {override: override.lstrip("+").partition("=")[0] for override in overrides}
    varied = {name for name in typed.values() if effect_of(name) in (Effect.RESULT, Effect.LENGTH)}
    current = cfg.choices, result_settings(flat(asdict(cfg)))

    def is_default(name: str) -> bool:
        key = name if effect_of(name) is not Effect.LENGTH else "budget"
        rest = trim_overrides(name, overrides, cfg.choices, varied)
        return "" != value_of(key, *current) == find_default(key, rest, cfg.choices)

    return [override for override, name in typed.items() if not is_default(name)]


@cache
def _read_file(group: str, choice: str, place: str) -> dict[str, str]:
    for folder in (CONF, Path.cwd()):  # ours, and the user's own
        file = folder / group / f"{choice}.yaml"
        if file.is_file():
            return flat(yaml.load(file.read_text(encoding="utf-8"), LOADER), place)
    return {}


@lru_cache(maxsize=256)
def _compose(overrides: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]] | None:
    """Return the choices and settings of a run with these overrides; None if they are refused."""
    from gptattn.settings.compose import settings  # imports Hydra

    try:
        cfg = settings(overrides)
    except UserError:
        return None
    return cfg.choices, result_settings(flat(asdict(cfg)))
