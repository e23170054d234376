"""Draws a prompt's attention weights: a PNG per layer, and one HTML page. This package may import
`build` and what comes before it. Start reading at `map_page.py`.
"""
