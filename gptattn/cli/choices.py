"""The config groups in conf/, and whether a command's choices in them exist."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode

from gptattn.errors import ConfigError
from gptattn.settings.values import suggest

# conf/ lies beside the package in a source tree, and inside it in a wheel.
CONF = next(
    folder
    for folder in (Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf")
    if folder.is_dir()
)
LISTED = ("part", "logger")  # groups of which a run takes a list of names
LONGEST_NAME = 200  # characters; Hydra looks for files of these names, which have a limit
Options = Callable[[str], Sequence[str]]  # group -> names of its files


def choices_in(group: str) -> list[str]:
    """Return the names of the files in a group of conf/; none if there is no such group."""
    if not group or not (CONF / group).is_dir():
        return []
    return [file.stem for file in (CONF / group).glob("*.yaml")]


def no_place(names: Sequence[str]) -> str:
    """Return what is said of an override of `attn` beside a pattern of these names."""
    listed = ",".join(names)
    return (
        f"has no place beside pattern=[{listed}], which names the attention of each layer; "
        "leave one of them out"
    )


def check_choices(overrides: Sequence[str], run_mode: RunMode, options: Options) -> None:
    """Raise ConfigError unless each choice is the name of a file in its group.

    Paths are always refused. A single run also refuses lists, null and numbers, a list of parts
    or loggers excepted; a sweep may have lists. `options` also knows the files in folders that a
    user adds.
    """
    for override in overrides:
        group, _, choice = override.partition("=")
        if len(group) > LONGEST_NAME:
            raise ConfigError(group[:50], f"is not a setting: its name has {len(group)} characters")
        if group.lstrip("+~") in LISTED:
            _check_list(group.lstrip("+~"), override, run_mode, options)
            continue
        if group.startswith("~") and choices_in(group[1:]):
            raise ConfigError(group[1:], f"cannot be removed; choose one with {group[1:]}=...")
        _refuse_plus(group, choice, overrides)
        names = choices_in(group)
        if not names:
            continue
        if run_mode == RunMode.RUN and re.match(r"[^\[{]*,|\w+\(", choice):
            raise ConfigError(group, f"{choice} gives several choices; add -m to run each")
        path = re.search(r"[/\\]|\.\.", choice) is not None
        plain = re.fullmatch(r"[A-Za-z_][\w.-]*|", choice) is not None and choice != "null"
        path = path or len(choice) > LONGEST_NAME  # too long for a file name
        if path or (run_mode == RunMode.RUN and not plain):
            raise ConfigError(group, f"{choice!r} is not a choice; {suggest(choice, names)}")


def _refuse_plus(group: str, choice: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for `+attn=...`: each group has a place that takes one choice."""
    plain = group.lstrip("+")
    if plain == group or not choices_in(plain) or "/" in plain:
        return
    patterns = [o.partition("=")[2] for o in overrides if re.match(r"\+*pattern=\[", o)]
    if plain == "attn" and patterns:
        raise ConfigError("attn", no_place([patterns[-1].strip("[]")]))
    raise ConfigError(plain, f"takes one choice; write {plain}={choice} without the +")


def _check_list(group: str, override: str, run_mode: RunMode, options: Options) -> None:
    """Raise ConfigError unless `part=...`, or another list, names different files of its group."""
    try:
        given = OverridesParser.create().parse_override(override)
    except HydraException:
        return  # Hydra's own message says more
    if given.is_delete():
        raise ConfigError(group, f"cannot be removed; {group}=[] is for none")
    if given.is_add() or given.is_force_add():
        raise ConfigError(group, f"already exists; write {group}=... without the +")
    if given.is_sweep_override():
        if run_mode == RunMode.RUN:
            raise ConfigError(
                group,
                f"{_text(given)} gives several choices; {group}=[a,b] takes both, -m runs each",
            )
        return  # the jobs are checked one by one
    value = given.value()
    chosen = [value] if isinstance(value, str) else value
    if not isinstance(chosen, list) or not all(isinstance(name, str) for name in chosen):
        raise ConfigError(group, f"{_text(given)} is not a list of names; give [] or [a,b]")
    names = options(group) if chosen else []
    for i, name in enumerate(chosen):
        if name not in names:
            raise ConfigError(group, f"{name[:LONGEST_NAME]!r} is unknown; {suggest(name, names)}")
        if name in chosen[:i]:
            raise ConfigError(group, f"{name} is given twice; name each {group} once")


def _text(override: Override) -> str:
    return str(override.input_line).partition("=")[2]
