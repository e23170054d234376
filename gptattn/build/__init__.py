"""The model, the tokenizer and the data of a run, built from its settings, and matched variants.

It may import `settings` and what comes before it. Start reading at `model.py`.
"""
