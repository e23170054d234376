"""Tokens as labels on an axis: short, on one line, with invisible characters made visible."""

import unicodedata

import numpy as np
from numpy.typing import NDArray

from gptattn.data.tokenizer import Tokenizer

LONGEST = 12  # characters of a label on an axis
SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def label_tokens(tokenizer: Tokenizer, ids: NDArray[np.integer]) -> list[str]:
    """Return a visible label for each id's text; a partial character is written as `\\xc3`."""
    parts = (tokenizer.to_bytes(id) for id in np.split(ids, len(ids)))
    return [make_visible(part.decode("utf-8", errors="backslashreplace")) for part in parts]


def make_visible(text: str) -> str:
    """Replace characters that are invisible or that move or reverse their neighbours.

    A space becomes ␣, a line break ⏎, a tab ⇥, and any other such character its code, like U+202E.
    """
    return "".join(_show(character) for character in text)


def _show(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    if not character.isprintable():
        return f"U+{ord(character):04X}"
    # A combining accent would be drawn on the character before it.
    return f"◌{character}" if unicodedata.combining(character) else character


def shorten(label: str, longest: int = LONGEST) -> str:
    """Return the label, cut to `longest` characters."""
    return label if len(label) <= longest else f"{label[: longest - 1]}…"
