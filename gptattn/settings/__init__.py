"""The settings of a run: their schema, how Hydra's config becomes them, and what each affects.

This package may import `data` and what comes before it. Start reading at `config.py`, then
`compose.py`.
"""
