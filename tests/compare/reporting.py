"""Helpers: sections and groups of runs in a folder, the report command, and its page's text."""

import html
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
from runfolders import write_run

from gptattn.cli.commands.compare import main
from gptattn.compare.comparison import Section
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.rows import Groups, group_runs
from gptattn.compare.table import load_comparison
from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig

LOSSES = {
    "mha": [2.00, 2.01, 2.02, 2.03, 2.04],
    "gqa": [2.11, 2.13, 2.15, 2.15, 2.16],
    "mqa": [2.31, 2.33, 2.35, 2.35, 2.36],
}


def report(*arguments: object, code: int = 0) -> None:
    """Run the command in this process; it must end with `code`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gptattn-compare", *map(str, arguments)])
        assert main() == code


@cache
def composed(overrides: str) -> TrainConfig:
    return settings(overrides.split())


def write_typed(folder: Path, overrides: str, seed: int = 1, loss: float = 2.0) -> Path:
    """Write a run as `train.py OVERRIDES` records it, in a folder of its own below `folder`."""
    cfg = composed(overrides)
    own = asdict(cfg) | {"seed": seed}
    place = folder / f"{overrides} {seed}".replace("/", "_")
    return write_run(place, cfg.variant, seed, loss, config=own)


def only_section(folder: Path, *overrides: str) -> Section:
    """The only section of the runs in the folder, after writing one of each of the overrides."""
    for typed in overrides:
        write_typed(folder, typed)
    (found,) = load_comparison(folder).sections
    return found


def groups_in(folder: Path) -> Groups:
    return group_runs(read_runs([folder])[0])


def page_text(file: Path) -> str:
    """The text of a page, without its tags."""
    return html.unescape(re.sub("<[^>]+>", "", file.read_text(encoding="utf-8")))
