"""Measures what a run's mean loss hides: the loss by position in the context, also beyond the
trained length, the loss through cheaper caches, and scores on tasks. This package may import `runs`
and what comes before it. Start reading at `measure.py`.
"""
