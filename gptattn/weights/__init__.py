"""Weights from elsewhere: from one attention to another, and from GPT-2 and back. It may import
`runs` and the rooms before it. Start reading at `convert.py`.
"""
