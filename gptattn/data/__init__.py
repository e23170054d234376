"""Sources of data, tokenizers, token files, synthetic tasks, the stateless sampler, and the hub.

This package may import `model` and what comes before it, but needs only `machine`, `errors` and the
loss's IGNORED target. Start reading at `run_data.py`, which defines what a run needs of its data,
then `tokens.py`, which makes the token file of any source, and `text.py`, which encodes texts for
it.
"""
