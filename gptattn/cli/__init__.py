"""The commands: training, which wraps `@hydra.main`, and the others.

It may import everything else. Start reading at `train.py`.
"""
