"""The parts of scripts/bench_gpu.py: what is checked and measured on a GPU, cell by cell.

`lab` is what they share. Start reading at `checks`.
"""
