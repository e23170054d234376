"""Run folders: their files, and how settings, weights, checkpoints and the state to resume from are
read back. This package may import `decode`, `maps` and what comes before them. Start reading at
`folder.py`, which needs no torch; nor does `rows.py`.
"""
