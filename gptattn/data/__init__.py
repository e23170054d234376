"""Text, tokenizers, token files, the stateless sampler, and folders of the hub. It may import
`machine` and `errors`. Start reading at `tokens.py`, from a text to what a run trains on.
"""
