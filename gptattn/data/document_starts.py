"""Where the documents of a token file begin, in a small file of its own beside it."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptattn.machine.disk import write_atomically

STARTS_DTYPE = np.dtype("<i8")

# (start, stop) -> the number of the document of each of these tokens; a document's are neighbours.
DocumentNumbers = Callable[[int, int], NDArray[np.int64]]


def numbers_between(starts: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """Return the number of the document of each token `start` .. `stop` - 1; the first has 0.

    `starts`: where documents begin, ascending.
    """
    first, last = np.searchsorted(starts, (start + 1, stop))
    numbers = np.zeros(stop - start, dtype=np.int64)
    numbers[starts[first:last] - start] = 1
    return numbers.cumsum()


def read_starts(folder: Path, key: str, tokens: int) -> NDArray[np.int64] | None:
    """Return what `write_starts` wrote for so many tokens; None if no intact file has it."""
    for file in folder.glob(f"{key}-*.starts"):
        raw = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(raw).hexdigest() != file.stem.rpartition("-")[2]:
            continue
        starts = np.frombuffer(raw, dtype=STARTS_DTYPE).astype(np.int64)
        within = np.diff(starts, prepend=-1, append=tokens) > 0
        if within.all():
            return starts
    return None


def write_starts(folder: Path, key: str, starts: NDArray[np.int64]) -> None:
    """Write `<key>-<sha256>.starts`, whole or not at all. Raises DiskError."""
    raw = starts.astype(STARTS_DTYPE).tobytes()
    file = folder / f"{key}-{hashlib.sha256(raw).hexdigest()}.starts"
    write_atomically(file, lambda target: target.write(raw))
