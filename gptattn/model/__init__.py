"""The language model: GPT, its loss in chunks, and its cost.

It may import `attention` and the rooms before it. Start reading at `gpt.py`.
"""
