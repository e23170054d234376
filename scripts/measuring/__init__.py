"""The parts of scripts/bench.py: each has `Arguments` and `measure`.

They share `tables`. `menu` names what is measured, and `peers` builds other libraries' models.
"""
