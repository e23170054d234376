"""One file per mechanism, with its projections, what it does to them, and what it caches."""
