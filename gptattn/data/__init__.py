"""Sources of data, tokenizers, token files, synthetic tasks, the stateless sampler, and the hub.

It may import `model` and what comes before it, but needs only `machine`, `errors` and the IGNORED
target of the loss. Start reading at `run_data.py`, what a run asks of its data, then `tokens.py`,
which makes the token file of any source, and `text.py`, which encodes texts for it.
"""
