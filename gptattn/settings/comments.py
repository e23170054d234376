"""The names of all settings and what is said of each: the comments in the files of `conf/`."""

import re
from pathlib import Path

OVER_OTHERS = ("launcher", "experiment", "recipe")  # groups that set what others explain


def list_settings(conf: Path) -> list[str]:
    """Return the names of all settings and groups, with dots, except for those of trackers."""
    found = [*read_comments(conf / "train.yaml")]
    for file in sorted(conf.glob("*/*.yaml")):
        if (group := file.parent.name) not in (*OVER_OTHERS, "logger"):
            found += [group, *read_comments(file, group)]
    return [*dict.fromkeys(found)]


def read_comments(file: Path, group: str = "") -> dict[str, str]:
    """Return the comment of each key in a YAML file, above it or beside it, by its dotted name.

    A file of a group holds the settings of that group unless its first line names another package.
    """
    found: dict[str, str] = {}
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
            # The comment at the top is the file's.
            words = [*(above if path else []), *([key[3]] if key[3] else [])]
            path = [*path[: len(key[1]) // 2], key[2]]
            if words:
                found[".".join(filter(None, [start, *path]))] = " ".join(words)
        above = []
    return found
