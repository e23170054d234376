"""Compares run folders: tables, statistics, verdicts in words, plots and the page.

This package may import `training` and what comes before it, but only modules that need neither
torch nor Lightning. Read it in the order from folder to page: `finished_runs.py`, `rows.py`,
`comparison.py`, `verdicts.py`, `table.py` and `report.py`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """Makes this subpackage a function too: `gptattn.compare("outputs/scratch")`."""

    def __call__(self, *folders: Any, **options: Any) -> Any:
        """Call `gptattn.compare.table.load_comparison` with these arguments."""
        from gptattn.compare.table import load_comparison  # imports pandas

        return load_comparison(*folders, **options)


sys.modules[__name__].__class__ = _CallableModule
