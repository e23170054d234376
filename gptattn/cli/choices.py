"""The config groups in conf/, and whether a command's choices in them exist."""

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.types import RunMode

from gptattn.errors import ConfigError
from gptattn.settings.values import suggest

# conf/ lies beside the package in a source tree, and inside it in a wheel.
CONF = next(
    folder
    for folder in (Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf")
    if folder.is_dir()
)
LONGEST_NAME = 200  # characters; Hydra looks for files of these names, which have a limit


def check_choices(overrides: Sequence[str], run_mode: RunMode) -> None:
    """Raise ConfigError unless each choice is the name of a file in its group.

    Paths are always refused. A single run also refuses lists, null and numbers; a sweep may have
    lists.
    """
    for override in overrides:
        group, _, choice = override.partition("=")
        if len(group) > LONGEST_NAME:
            raise ConfigError(group[:50], f"is not a setting: its name has {len(group)} characters")
        if group.startswith("~") and choices_in(group[1:]):
            raise ConfigError(group[1:], f"cannot be removed; choose one with {group[1:]}=...")
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


def choices_in(group: str) -> list[str]:
    """Return the names of the files in a group; none if there is no such group."""
    if not group or not (CONF / group).is_dir():
        return []
    return [file.stem for file in (CONF / group).glob("*.yaml")]
