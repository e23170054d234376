"""Text from a trained model: sampling, generation with caches, and prompts. This package may import
`build` and what comes before it. Start reading at `generate.py`.
"""
