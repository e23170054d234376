"""The commands besides training. Each has a thin file in scripts/ that calls it."""
