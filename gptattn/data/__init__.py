"""Text, tokenizers, token files, the stateless sampler, and folders of the hub. It may import
`model` and the rooms before it, and needs of them `machine` and `errors` alone. Start reading at
`tokens.py`, from a text to what a run trains on.
"""
