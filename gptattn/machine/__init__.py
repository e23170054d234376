"""What a program needs of the machine that it runs on: devices, processors and how threads wait,
files that are replaced whole, locks, signals, the console, files that others may have written, and
source code as hashes. It may import `errors` alone. Start reading at `disk.py`, which writes every
file that is replaced.
"""
