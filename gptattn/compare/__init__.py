"""From run folders to an answer: statistics, verdicts in words, tables, plots and the page. It may
import `training` and the rooms before it, but of these only what needs neither torch nor
Lightning. Start reading at `comparison.py`.
"""
