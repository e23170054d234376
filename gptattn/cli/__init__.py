"""What surrounds `@hydra.main`, and the other commands.

It may import every other room. Start reading at `train.py`.
"""
