"""The language model: GPT, its loss in chunks, and its cost.

This package may import `attention` and what comes before it. Start reading at `gpt.py`.
"""
