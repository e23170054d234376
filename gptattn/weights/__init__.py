"""Convert weights from one attention variant to another, and read and write GPT-2 checkpoints. It
may import `runs` and the rooms before it. Start reading at `convert.py`.
"""
