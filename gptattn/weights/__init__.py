"""Converts weights from one attention variant to another, and reads and writes checkpoints of
GPT-2, Llama and Qwen2; it also reads those of Qwen3 and SmolLM3. This package may import `runs` and
what comes before it. Start reading at `convert.py`.
"""
