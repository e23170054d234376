"""The parts of scripts/bench.py, each with its options (`new_parser`) and `measure`.

`rounds` is what they share, `menu` names what is measured, and `peers` builds other libraries'
models.
"""
