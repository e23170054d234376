"""Access to the machine: devices, processors and how threads wait, atomic file writes, locks,
signals, the console, page templates, files from untrusted sources, and hashes of source code. It
may import `errors` only. Start reading at `disk.py`, which writes every file that is replaced.
"""
