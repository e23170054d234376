"""A text as documents that are read in pieces, never all at once."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gptattn.data.text_file import TextFile
from gptattn.data.tokenizer import utf8
from gptattn.errors import DataError

PIECE_CHARS = 2**20  # held at a time

Pieces = Callable[[], Iterator[str]]  # each call reads a document's text from the beginning


@dataclass(frozen=True)
class Corpus:
    """Training documents, and held-out documents for validation.

    Without held-out documents, the tail of each training document is held out. Once the documents
    have been read, `left_out` names what was dropped from their files, such as a byte order mark.
    """

    documents: Sequence[Pieces]
    held_out: Sequence[Pieces] = ()
    left_out: set[str] = field(default_factory=set)

    @property
    def size(self) -> int:
        """The bytes of its files; what is no file does not count."""
        files = [*self.documents, *self.held_out]
        return sum(file.path.stat().st_size for file in files if isinstance(file, TextFile))


def corpus_of(text: str) -> Corpus:
    """Return a corpus of one document, of which the tail will be held out."""
    return Corpus([lambda: (text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS))])


@dataclass(frozen=True)
class Document:
    """A document, with its hash and length when it was first read."""

    pieces: Pieces
    sha256: str  # of its UTF-8
    length: int  # in characters
    size: int  # in bytes of UTF-8

    def part(self, start: int, stop: int) -> Iterator[str]:
        """Yield the characters `start` .. `stop` - 1, in pieces.

        Raises DataError, at the end, if the document has changed since it was first read.
        """
        digest, place = hashlib.sha256(), 0
        for piece in self.pieces():
            digest.update(utf8(piece, "data"))
            if found := piece[max(0, start - place) : max(0, stop - place)]:
                yield found
            place += len(piece)
        if digest.hexdigest() != self.sha256:
            raise DataError("data", "the text changed while it was being read; start again")

    def characters(self, size: int) -> int:
        """Return how many characters fit into the first `size` bytes."""
        count = 0
        for piece in self.pieces():
            raw = utf8(piece, "data")
            if len(raw) > size:
                return count + len(raw[:size].decode(errors="ignore"))
            size -= len(raw)
            count += len(piece)
        return count


def read_through(documents: Sequence[Pieces], seen: list[Document]) -> Iterator[str]:
    """Yield the pieces of all documents; add each document to `seen` once it is read to its end."""
    for pieces in documents:
        digest, length, size = hashlib.sha256(), 0, 0
        for piece in pieces():
            raw = utf8(piece, "data")
            digest.update(raw)
            length += len(piece)
            size += len(raw)
            yield piece
        seen.append(Document(pieces, digest.hexdigest(), length, size))


def text_hash(documents: Sequence[Document], held_out: Sequence[Document]) -> str:
    """Return a hash of the training documents, the held-out documents, and where documents end.

    For a single document, with none held out, it is the SHA-256 of its UTF-8.
    """
    if len(documents) == 1 and not held_out:
        return documents[0].sha256
    lines = [d.sha256 for d in documents] + ["held out"] + [d.sha256 for d in held_out]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


Part = tuple[Document, int, int]  # a document's characters from `start` up to `stop`


def whole(documents: Sequence[Document]) -> list[Part]:
    """Return each document as one part."""
    return [(document, 0, document.length) for document in documents]


def size_of(parts: Sequence[Part]) -> int:
    """Return about how many bytes the parts have."""
    return sum(d.size * (stop - start) // max(1, d.length) for d, start, stop in parts)


def heads_and_tails(
    documents: Sequence[Document], fraction: float
) -> tuple[list[Part], list[Part]]:
    """Split each document in two, whatever the tokenizer.

    The tail of a single document has `fraction` of its bytes; all tails of several documents have
    together `fraction` of the characters. It is at least one character; empty parts are left out.
    """
    cuts = [_cut(documents[0], fraction)] if len(documents) == 1 else _cuts(documents, fraction)
    pairs = list(zip(documents, cuts, strict=True))
    heads = [(document, 0, cut) for document, cut in pairs if cut]
    tails = [(document, cut, document.length) for document, cut in pairs if cut < document.length]
    return heads, tails


def _cut(document: Document, fraction: float) -> int:
    """Return where the tail begins; a character that the limit would cut in two is in the tail."""
    return document.characters(document.size - max(1, round(document.size * fraction)))


def _cuts(documents: Sequence[Document], fraction: float) -> list[int]:
    cuts, total, held = [], 0, 0
    for document in documents:
        total += document.length
        # Rounding the total over all documents so far lets many short ones give their share too.
        due = max(1, round(total * fraction))
        cuts.append(document.length - (due - held))
        held = due
    return cuts
