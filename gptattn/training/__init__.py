"""One run, from settings to summary.json: checks, Lightning module, data module and callbacks.

It may import `weights` and what comes before it. Start reading at `run.py`.
"""
