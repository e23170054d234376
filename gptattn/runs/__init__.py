"""What lies where in a run's folder, and what is read back from it: settings, weights,
checkpoints, and where a run goes on. It may import `decode`, `maps` and the rooms before them.
Start reading at `folder.py`, which needs no torch; nor does `rows.py`.
"""
