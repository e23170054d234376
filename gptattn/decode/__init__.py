"""Text out of a trained model: sampling, generation with caches, prompts, and text that is told as
it comes. It may import `settings` and the rooms before it. Start reading at `generate.py`.
"""
