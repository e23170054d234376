"""Helpers: compare runs, run `gptattn-compare` in this process, and parse its page."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gptattn.cli.commands.compare import main
from gptattn.compare.comparison import Comparison, compare
from gptattn.compare.finished_runs import read_runs

LOSSES = {
    "mha": [2.00, 2.01, 2.02, 2.03, 2.04],
    "gqa": [2.11, 2.13, 2.15, 2.15, 2.16],
    "mqa": [2.31, 2.33, 2.35, 2.35, 2.36],
}
NAMES = (
    "loss_tokens",
    "loss_flops",
    "loss_seconds",
    "pareto_params",
    "pareto_cache",
    "pareto_flops",
)


def report(*arguments: object, code: int = 0) -> None:
    """Run the command in this process; it must end with `code`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gptattn-compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
    assert stop.value.code == code


def compared(*folders: Path, **options: Any) -> Comparison:
    """Compare the runs in the folders, as the command does."""
    return compare(read_runs(folders)[0], **options)


class Page(HTMLParser):
    """Parses a page: its tags, ids and text, and every address that it refers to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.policy = ""
        self.text = ""
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)

    def runs_no_script(self) -> bool:
        """Whether it has no script, and its policy allows none and no other file."""
        return (
            "script" not in self.tags
            and self.policy == "default-src 'none'; style-src 'unsafe-inline'"
        )

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.references.append(value)

    def handle_data(self, data: str) -> None:
        self.text += data
