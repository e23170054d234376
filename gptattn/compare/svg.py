"""matplotlib's SVG made fit for a page: the reader's text colour, and names of its own."""

import re

# Stands for the colour of the reader's text; a black that no palette holds.
INK = "#1b1c1d"
STYLE = "<style>svg{color:#1b1c1d}@media(prefers-color-scheme:dark){svg{color:#e4e4e7}}</style>"


def adapted(svg: str, name: str, title: str) -> str:
    """The svg element alone: ink is currentColor, no background, ids prefixed with `name`.

    Raises ValueError if this is not matplotlib's SVG.
    """
    start = svg.index("<svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[start:], flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    # The figure's and the axes' white backgrounds.
    svg = re.sub(r'<g id="patch_[12]">.*?</g>', "", svg, count=2, flags=re.DOTALL)
    for pattern in (r'(\bid=")', r"(url\(#)", r'(xlink:href="#)'):
        svg = re.sub(pattern, rf"\g<1>{name}-", svg)
    # Text without a colour of its own is black: the root's fill is inherited.
    size = re.search(r'<svg [^>]*?viewBox="[^"]*"', svg)
    if size is None:
        raise ValueError("no viewBox in the SVG")
    width_and_height = re.compile(r' (width|height)="[^"]*pt"')
    end = svg.index(">")
    head = width_and_height.sub("", svg[:end])
    return f'{head} role="img" aria-label="{title}" fill="currentColor">{svg[end + 1 :]}'.strip()


def standalone(svg: str) -> str:
    """A file of its own, which looks up by itself whether its reader has it dark."""
    end = svg.index(">") + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg[:end]}{STYLE}{svg[end:]}\n'
