"""Adapts matplotlib's SVG to a page: the page's text colour, and ids unique to each plot."""

import re

# Placeholder for the page's text colour: a near-black that no palette contains.
INK = "#1b1c1d"
LONG_DECIMALS = re.compile(r"(\.\d\d)\d+")
STYLE = "<style>svg{color:#1b1c1d}@media(prefers-color-scheme:dark){svg{color:#e4e4e7}}</style>"


def adapted(svg: str, name: str, title: str) -> str:
    """Return the <svg> element: INK as currentColor, no background, ids prefixed with `name`.

    Raises ValueError if `svg` is not an SVG of matplotlib's.
    """
    start = svg.index("<svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[start:], flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    # Paths are most of the file: a hundredth of a point is finer than any print.
    svg = re.sub(r' d="[^"]*"', lambda path: LONG_DECIMALS.sub(r"\1", path[0]), svg)
    # The figure's and the axes' white backgrounds.
    svg = re.sub(r'<g id="patch_[12]">.*?</g>', "", svg, count=2, flags=re.DOTALL)
    for pattern in (r'(\bid=")', r"(url\(#)", r'(xlink:href="#)'):
        svg = re.sub(pattern, rf"\g<1>{name}-", svg)
    # Text without a colour would be black, so the root gets fill="currentColor" to inherit.
    size = re.search(r'<svg [^>]*?viewBox="[^"]*"', svg)
    if size is None:
        raise ValueError("no viewBox in the SVG")
    width_and_height = re.compile(r' (width|height)="[^"]*pt"')
    end = svg.index(">")
    head = width_and_height.sub("", svg[:end])
    return f'{head} role="img" aria-label="{title}" fill="currentColor">{svg[end + 1 :]}'.strip()


def standalone(svg: str) -> str:
    """Return an SVG file of its own, with text colours for light and dark mode."""
    end = svg.index(">") + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg[:end]}{STYLE}{svg[end:]}\n'
