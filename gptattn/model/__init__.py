"""The language model: GPT, its loss over chunks, which of its weights decay, and what it costs. It
may import `attention` and the rooms before it. Start reading at `gpt.py`.
"""
