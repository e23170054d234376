"""One file per mechanism; each shows its projections, what it does to them, and what it caches."""
