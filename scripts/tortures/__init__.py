"""The rows of scripts/torture.py: each breaks runs in one way, and counts what became of them."""
