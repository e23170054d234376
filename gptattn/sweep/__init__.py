"""Sweeps, the many runs of one command: a loop over stages, their plans, and the launcher. It may
import `compare` and what comes before it. Start reading at `loop.py`.
"""
