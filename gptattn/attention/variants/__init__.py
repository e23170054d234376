"""One file per mechanism: its projections, what it does with them, and what it caches."""
