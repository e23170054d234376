"""A prompt's attention weights as pictures: a PNG per layer, and one HTML page. It may import
`settings` and the rooms before it. Start reading at `map_page.py`.
"""
