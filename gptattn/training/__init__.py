"""One run, from settings to summary.json: checks, Lightning module, record and callbacks.

This package may import `weights` and what comes before it. Start reading at `run.py`.
"""
