"""Builds a run's model, tokenizer and data from its settings, and matches variants.

This package may import `settings` and what comes before it. Start reading at `model.py`.
"""
