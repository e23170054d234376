"""Turns run folders into an answer: statistics, verdicts in words, tables, plots and the page. It
may import `training` and the rooms before it, but only modules that need neither torch nor
Lightning. Start reading at `comparison.py`.
"""
