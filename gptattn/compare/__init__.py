"""Turns run folders into an answer: a table of runs, statistics, words, plots and the page.

It may import `training` and what comes before it, but only modules that need neither torch nor
Lightning. Start reading at `finished_runs.py`; from folder to page follow `rows.py`,
`comparison.py`, `verdicts.py`, `table.py` and `report.py`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """So that `gptattn.compare("outputs/scratch")` works, although it is also this subpackage."""

    def __call__(self, *folders: Any, **options: Any) -> Any:
        """Return `gptattn.compare.table.load_comparison` of the same arguments."""
        from gptattn.compare.table import load_comparison  # imports pandas

        return load_comparison(*folders, **options)


sys.modules[__name__].__class__ = _CallableModule
