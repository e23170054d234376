"""A prompt's attention weights as pictures: a PNG per layer, and one HTML page. It may import
`settings` and what comes before it. Start reading at `map_page.py`.
"""
