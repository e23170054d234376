"""Text, tokenizers, token files, the stateless sampler, and the Lightning datamodule."""
