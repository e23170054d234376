"""Helpers: run `gptattn-compare` in this process, and parse its page."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gptattn.cli.commands.compare import main

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


class Page(HTMLParser):
    """Parses a page: its tags, ids and text, and every address that it refers to.

    `markup` is the source without what stands in its scripts, which `scripts` holds.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.text = ""
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)
        self.markup = self.source
        for script in self.scripts:
            self.markup = self.markup.replace(script, "")

    @property
    def charts(self) -> list[dict[str, Any]]:
        """What the page's own script draws."""
        return json.loads(self.scripts[0])

    def runs_only_our_scripts(self) -> bool:
        """Whether its scripts are uPlot and ours, word for word, and its policy allows no other."""
        folder = files("gptattn.compare")
        data, vendored, own = self.scripts
        digests = [hashlib.sha256(script.encode()).digest() for script in (vendored, own)]
        allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        return (
            own == folder.joinpath("page.js").read_text(encoding="utf-8")
            and vendored.endswith(folder.joinpath("vendor/uPlot.iife.min.js").read_text("utf-8"))
            and f'<script type="application/json" id="charts">{data}</script>' in self.source
            and self.policy
            == f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
        )

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.references.append(value)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data
