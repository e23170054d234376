"""Fills `train.py --help` with choices and settings, from the comments in the YAML files.

The template in conf/hydra/help calls the two resolvers with the config that Hydra has composed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gptattn.settings.comments import OVER_OTHERS, read_comments
from gptattn.settings.config import CONF

WIDTH = 100  # columns
TRAIN = CONF / "train.yaml"


def describe_choices(_root_: DictConfig) -> str:
    """Return the files of each config group with their first lines."""
    lines = list[str]()
    for group, files in _find_files(_root_):
        rows = {name: _read_header(file) for name, file in files.items()}
        lines += [f"  {group}=", *_make_table(rows)]
    return _escape(lines)


def describe_settings(_root_: DictConfig) -> str:
    """Return all settings with their values and comments, by group.

    Settings without a comment are left out.
    """
    own = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    plain: Any = OmegaConf.to_container(own, resolve=True)
    choices = _root_.hydra.runtime.choices
    others, chosen = dict[str, str](), dict[str, str]()
    for group, files in _find_files(_root_):
        for name, file in files.items() if group not in OVER_OTHERS else ():
            target = chosen if name == choices.get(group) else others
            target |= read_comments(file, group)
    comments = others | read_comments(TRAIN) | chosen
    sections: dict[str, dict[str, str]] = {}
    for name, value in _flatten(plain):
        if name in comments:
            group = name.partition(".")[0] if "." in name else "run"
            sections.setdefault(group, {})[f"{name}={value}"] = comments[name]
    lines = list[str]()
    for group, rows in sections.items():
        title = f"{group}={choices[group]}" if group in choices else group
        lines += [f"  {title}", *_make_table(rows)]
    return _escape(lines)


def _find_files(root: DictConfig) -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield each config group with its files, including those in the user's folders."""
    folders = [Path(one.path) for one in root.hydra.runtime.config_sources if one.schema == "file"]
    defaults = [one for one in OmegaConf.load(TRAIN).defaults if isinstance(one, DictConfig)]
    for group in [str(key) for one in defaults for key in one if " " not in str(key)]:
        files = {f.stem: f for one in reversed(folders) for f in (one / group).glob("*.yaml")}
        yield group, dict(sorted(files.items()))


def _read_header(file: Path) -> str:
    """Return the first line of the comment at the top of a file; after a colon, two lines."""
    lines = file.read_text(encoding="utf-8").splitlines()
    first, second, *_ = [*(line for line in lines if not line.startswith("# @package")), "", ""]
    header = f"{first} {second.lstrip('# ')}" if first.endswith(":") else first
    return header.lstrip("# ") if first.startswith("#") else ""


def _flatten(node: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting's dotted name and its value, as a user would type them."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{start}{key}.")
        else:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            yield f"{start}{key}", text.replace('"', "")


def _make_table(rows: Mapping[str, str]) -> list[str]:
    """Return a two-column table; texts are wrapped."""
    width, lines = max(map(len, rows), default=0) + 2, list[str]()
    for name, text in rows.items():
        start, rest = f"    {name:<{width}}", " " * (width + 4)
        lines += wrap(text, WIDTH, initial_indent=start, subsequent_indent=rest) or [start.rstrip()]
    return lines


def _escape(lines: list[str]) -> str:
    """Escape $, which Hydra's template would read as its own."""
    return "\n".join(lines).replace("$", "$$")


OmegaConf.register_new_resolver("help.choices", describe_choices, replace=True)
OmegaConf.register_new_resolver("help.settings", describe_settings, replace=True)
