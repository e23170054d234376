"""Text from a trained model: sampling, generation with caches, prompts, and an incremental
detokenizer. It may import `build` and what comes before it. Start reading at `generate.py`.
"""
