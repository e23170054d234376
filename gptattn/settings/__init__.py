"""A run's settings: their types and ranges, which of them change its result, and the objects
built from them. It may import `data` and the rooms before it, but not Hydra. Start reading at
`config.py`, then `build.py`.
"""
