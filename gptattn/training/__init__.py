"""One run, from settings to summary.json: the checks before it starts, the Lightning module and data
module, and the callbacks. It may import `weights` and the rooms before it. Start reading at `run.py`.
"""
