"""Access to the machine: devices, files, locks, signals, the console, and how a command ends.

This package may import `errors` only. Start reading at `disk.py`.
"""
