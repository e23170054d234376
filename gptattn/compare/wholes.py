"""What spans several sections of the report, as a table with its words: changes and ladders."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptattn.compare import across_words, ladder_words
from gptattn.compare.results import Comparison


@dataclass(frozen=True)
class Whole:
    """A table over several sections, heading row first, with its words."""

    title: str
    sentences: Sequence[str]
    notes: Sequence[str]
    cells: Sequence[Sequence[str]]
    caption: str


def wholes(comparison: Comparison) -> list[Whole]:
    """Return the tables of the ladders, then those of the changes."""
    found = [(ladder_words, each) for each in comparison.ladders]
    found += [(across_words, each) for each in comparison.across]
    return [
        Whole(
            words.title(each),
            words.sentences(each),
            words.notes(each),
            words.cells(each),
            words.caption(each),
        )
        for words, each in found
    ]
