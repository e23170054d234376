"""The names of all settings, and the comment on each in the files of `conf/`."""

import re
from pathlib import Path

OVER_OTHERS = ("launcher", "experiment", "recipe")  # groups that set what other files explain


def list_settings(conf: Path) -> list[str]:
    """Return the dotted names of all settings and groups, except those of trackers."""
    names = [*read_comments(conf / "train.yaml")]
    for file in sorted(conf.glob("*/*.yaml")):
        if (group := file.parent.name) not in (*OVER_OTHERS, "logger"):
            names += [group, *read_comments(file, group)]
    return [*dict.fromkeys(names)]


def read_comments(file: Path, group: str = "") -> dict[str, str]:
    """Return the comments on keys in a YAML file, above or after the key, by dotted name.

    A group's file holds that group's settings, unless its first line names another package.
    """
    comments: dict[str, str] = {}
    above, path = list[str](), list[str]()
    text = file.read_text(encoding="utf-8")
    package = re.match(r"# @package (\S+)", text)
    start = group if package is None else package[1].replace("_global_", "")
    for line in text.splitlines():
        key = re.match(r"( *)(\w+):(?: .*?)??(?:\s#\s(.*))?$", line)
        if line.lstrip().startswith("#"):
            above.append(line.lstrip("# "))
            continue
        if key is not None:
            # The comment at the top describes the file.
            words = [*(above if path else []), *([key[3]] if key[3] else [])]
            path = [*path[: len(key[1]) // 2], key[2]]
            if words:
                comments[".".join(filter(None, [start, *path]))] = " ".join(words)
        above = []
    return comments
