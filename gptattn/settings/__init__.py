"""A run's settings: their types and ranges, what each means for the run's identity, and the
objects that they stand for. It may import `data` and the rooms before it, and no Hydra. Start
reading at `config.py`, then `build.py`.
"""
