"""Text, tokenizers, token files, the stateless sampler, and folders on the hub. It may import
`model` and the rooms before it, but needs only `machine` and `errors`. Start reading at
`tokens.py`, which turns a text into the tokens of a run.
"""
