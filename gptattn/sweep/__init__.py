"""Makes the many runs of one command: skips finished runs, estimates time and statistical power,
starts each run in its own process. It may import `compare` and the rooms before it. Start reading
at `run_sweep.py`.
"""
