"""The code around `@hydra.main`, and the other commands.

It may import everything else. Start reading at `train.py`.
"""
