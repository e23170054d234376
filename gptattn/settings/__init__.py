"""The schema of a run's settings, from Hydra's config to them, and what a change of one means.

It may import `data` and what comes before it. Start reading at `config.py`, then `compose.py`.
"""
