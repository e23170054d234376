"""A prompt's attention weights, to be looked at: a picture per layer, and one page. It may import
`settings` and the rooms before it. Start reading at `map_page.py`.
"""
