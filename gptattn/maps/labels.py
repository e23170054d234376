"""Tokens as they stand on an axis: short, on one line, with everything in them to be seen."""

import unicodedata

import numpy as np
from numpy.typing import NDArray

from gptattn.data.tokenizer import Tokenizer

LONGEST = 12  # characters of a label on an axis
SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def token_labels(tokenizer: Tokenizer, ids: NDArray[np.integer], text: str) -> list[str]:
    """What each id stands for in the text, made visible; a byte of a split character as `\\xc3`."""
    raw = text.encode("utf-8", errors="surrogatepass")
    ends = tokenizer.byte_lengths()[ids].cumsum().tolist()
    starts = [0, *ends[:-1]]
    return [
        visible(raw[start:end].decode("utf-8", errors="backslashreplace"))
        for start, end in zip(starts, ends, strict=True)
    ]


def visible(text: str) -> str:
    """The text with no character that is invisible, or that moves or turns what stands beside it.

    A space is ␣, a line break ⏎, a tab ⇥, any other one its number, as U+202E.
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    if not character.isprintable():
        return numbered(character)
    # An accent alone would sit on its neighbour.
    return f"◌{character}" if unicodedata.combining(character) else character


def numbered(character: str) -> str:
    return f"U+{ord(character):04X}"


def short(label: str, longest: int = LONGEST) -> str:
    return label if len(label) <= longest else f"{label[: longest - 1]}…"
