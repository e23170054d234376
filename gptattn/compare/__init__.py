"""Turns run folders into an answer: a table of runs, statistics, words, plots and the page.

It may import `training` and what comes before it, but only modules that need neither torch nor
Lightning. Start reading at `finished_runs.py`; from folder to page follow `groups.py`,
`comparison.py`, `verdicts.py`, `table.py` and `report.py`.
"""

from gptattn.compare.finished_runs import load_runs

__all__ = ["load_runs"]
