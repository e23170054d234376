"""Access to the machine: devices, atomic file writes, locks, signals, the console, page templates, how
a command ends, and hashes of source code. It may import `errors` only. Start reading at `disk.py`.
"""
