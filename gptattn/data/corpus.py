"""A text as documents that are read in pieces: never all of it at once."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gptattn.data.tokenizer import utf8
from gptattn.errors import DataError

PIECE = 2**20  # bytes or characters that are held at a time

Pieces = Callable[[], Iterator[str]]  # a document's text, from its beginning at each call


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and those held out for validation; without any, tails are held out.

    `left_out` tells, once the documents were read, what of their files is no part of the text.
    """

    documents: Sequence[Pieces]
    held_out: Sequence[Pieces] = ()
    left_out: set[str] = field(default_factory=set)


def corpus_of(text: str) -> Corpus:
    """One document, with the tail of it held out."""
    return Corpus([lambda: (text[i : i + PIECE] for i in range(0, len(text), PIECE))])


@dataclass(frozen=True)
class Document:
    """A document as it was when it was read first."""

    pieces: Pieces
    sha256: str  # of its UTF-8
    length: int  # in characters

    def part(self, start: int, stop: int) -> Iterator[str]:
        """The characters `start` .. `stop` - 1, in pieces.

        Raises DataError, at the end, where the document is no longer what it was.
        """
        digest, place = hashlib.sha256(), 0
        for piece in self.pieces():
            digest.update(utf8(piece, "data"))
            if found := piece[max(0, start - place) : max(0, stop - place)]:
                yield found
            place += len(piece)
        if digest.hexdigest() != self.sha256:
            raise DataError("data", "the text was changed while it was read; start again")


def read_through(documents: Sequence[Pieces], seen: list[Document]) -> Iterator[str]:
    """The pieces of all documents; each that has been read to its end is added to `seen`."""
    for pieces in documents:
        digest, length = hashlib.sha256(), 0
        for piece in pieces():
            digest.update(utf8(piece, "data"))
            length += len(piece)
            yield piece
        seen.append(Document(pieces, digest.hexdigest(), length))


def text_hash(documents: Sequence[Document], held_out: Sequence[Document]) -> str:
    """Names the content: what is trained on, what is held out, and where documents end.

    That of one document is the SHA-256 of its UTF-8.
    """
    if len(documents) == 1 and not held_out:
        return documents[0].sha256
    lines = [d.sha256 for d in documents] + ["held out"] + [d.sha256 for d in held_out]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


Part = tuple[Document, int, int]  # its characters from the first number up to the second


def whole(documents: Sequence[Document]) -> list[Part]:
    return [(document, 0, document.length) for document in documents]


def heads_and_tails(
    documents: Sequence[Document], fraction: float
) -> tuple[list[Part], list[Part]]:
    """Each document in two, so that the tails hold `fraction` of the characters: at least one."""
    heads, tails, total, held = [], [], 0, 0
    for document in documents:
        total += document.length
        # Rounded over all documents so far: many short ones give their share as well.
        due = max(1, round(total * fraction))
        cut = document.length - (due - held)
        held = due
        heads.append((document, 0, cut))
        tails.append((document, cut, document.length))
    return [part for part in heads if part[2]], [part for part in tails if part[1] < part[2]]
