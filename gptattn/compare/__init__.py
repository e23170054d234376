"""Turns run folders into an answer: statistics, verdicts in words, tables, plots and the page. It
may import `training` and the rooms before it, but only modules that need neither torch nor
Lightning. Start reading at `comparison.py`.
"""

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptattn.compare.loaded import Loaded


def load(
    *folders: str | PathLike[str], baseline: str | None = None, split: bool = False
) -> "Loaded":
    """Return the comparison of the finished runs in these folders, as `gptattn-compare` makes it.

    `load("outputs/x").table()` is a pandas DataFrame with one row per variant. The arguments are
    those of the command. Raises DataError if there is no finished run, ConfigError if the runs
    cannot be compared.
    """
    # Here, so that importing the package stays light.
    from gptattn.compare.loaded import loaded

    return loaded(folders, baseline, split)
