"""The commands: training, which wraps `@hydra.main`, and the others.

This package may import everything else. Start reading at `train.py`.
"""
