"""Sources of data, tokenizers, token files, synthetic tasks, the stateless sampler, and the hub. It
may import `model` and the rooms before it, but needs only `machine`, `errors` and the mark of a
target that the loss ignores. Start reading at `run_data.py`, what a run asks of its data, and then
`tokens.py`, which makes the token file of a text.
"""
