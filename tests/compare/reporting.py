"""Helpers: sections and groups of runs in a folder, the report command, and its page parsed."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gptattn.cli.commands.compare import main
from gptattn.compare.comparison import Section
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.groups import Groups, group_runs
from gptattn.compare.table import load_comparison

LOSSES = {
    "mha": [2.00, 2.01, 2.02, 2.03, 2.04],
    "gqa": [2.11, 2.13, 2.15, 2.15, 2.16],
    "mqa": [2.31, 2.33, 2.35, 2.35, 2.36],
}


def report(*arguments: object, code: int = 0) -> None:
    """Run the command in this process; it must end with `code`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gptattn-compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
    assert stop.value.code == code


def only_section(folder: Path) -> Section:
    (found,) = load_comparison(folder).sections
    return found


def groups_in(folder: Path) -> Groups:
    return group_runs(read_runs([folder])[0])


class Page(HTMLParser):
    """Parses a page: its tags, ids and text, and every address that it refers to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.references.append(value)

    def handle_data(self, data: str) -> None:
        self.text += data
