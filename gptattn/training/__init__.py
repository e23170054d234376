"""One run, from settings to summary.json: the Lightning module, its data, what happens beside the
steps, and the checks before the first. It may import `weights` and the rooms before it. Start
reading at `train.py`.
"""
