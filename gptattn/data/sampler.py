"""Which tokens a batch holds: a pure function of (seed, step), the same for every variant."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptattn.data.tokenizer import Ids

# int64: ids [B, T], the tokens that follow them [B, T] and, if documents are kept apart, the number
# of each id's document [B, T].
Batch = tuple[Tensor, ...]
# (start, stop) -> the document number of each of these tokens; a document's tokens are neighbours.
DocumentNumbers = Callable[[int, int], NDArray[np.int64]]


# The fractional parts of its multiples are spread most evenly.
GOLDEN = (5**0.5 - 1) / 2


def make_generator(seed: int, step: int, stream: int = 0) -> np.random.Generator:
    """Return the generator of optimizer step `step`; its streams are independent."""
    # Philox is a counter-based generator: (seed, step) is its key, and no state is carried.
    return np.random.Generator(np.random.Philox(counter=[0, 0, 0, stream], key=[seed, step]))


def window_starts(
    seed: int, step: int, count: int, windows: int, even: bool = False
) -> NDArray[np.int64]:
    """Return `count` window starts for optimizer step `step`, uniform in 0 .. windows - 1.

    With `even`, the starts of all steps so far are spread evenly, and only the first is random;
    `count` must then be the same at every step.
    """
    if even:  # a Kronecker sequence, randomly shifted
        shift = make_generator(seed, 0, stream=2).random()
        numbers = np.arange(step * count, (step + 1) * count)
        return ((shift + GOLDEN * numbers) % 1 * windows).astype(np.int64)
    return make_generator(seed, step).integers(0, windows, size=count)


def training_batch(
    tokens: Ids,
    seed: int,
    step: int,
    batch_size: int,
    context_length: int,
    documents: DocumentNumbers | None = None,
    even: bool = False,
) -> Batch:
    """Return the batch of optimizer step `step`: `batch_size` rows of `context_length` tokens.

    `documents` numbers the documents to keep apart; `even`: see `window_starts`.
    """
    windows = len(tokens) - context_length
    starts = window_starts(seed, step, batch_size, windows, even).tolist()
    found = np.stack([tokens[start : start + context_length + 1] for start in starts])
    both = torch.from_numpy(found.astype(np.int64))
    batch = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    if documents is None:
        return batch
    numbers = np.stack([documents(start, start + context_length) for start in starts])
    return *batch, torch.from_numpy(numbers)


def rows_of(batch_size: int, accumulate: int, rank: int, size: int) -> NDArray[np.int64]:
    """Return the rows of a batch that process `rank` of `size` trains on.

    They are its part of each of the `accumulate` micro-batches. In order, the processes' parts make
    up the micro-batches that a single process would have.
    """
    parts = np.arange(batch_size).reshape(accumulate, size, -1)
    return parts[:, rank].reshape(-1)


@dataclass(frozen=True)
class TrainingStream:
    """The endless micro-batches of a run from optimizer step `first_step` on.

    `batch(step)` returns a step's micro-batches in order, as one batch.
    """

    batch: Callable[[int], Batch]
    first_step: int = 0
    on_batch_made: Callable[[float], None] = lambda seconds: None  # called after each batch is made
    accumulate: int = 1  # micro-batches of a step

    def __iter__(self) -> Iterator[Batch]:
        step = self.first_step
        while True:
            start = time.perf_counter()
            batch = self.batch(step)
            self.on_batch_made(time.perf_counter() - start)
            rows = len(batch[0]) // self.accumulate
            yield from zip(*(tensor.split(rows) for tensor in batch), strict=True)
            step += 1


@dataclass(frozen=True)
class ValidationSet:
    """All held-out tokens in order, each scored once, except the first, which is only context.

    Windows do not overlap; the tokens left at the end make a shorter window, in its own batch.
    `documents` numbers the documents to keep apart.
    """

    tokens: Ids
    batch_size: int
    context_length: int
    documents: DocumentNumbers | None = None

    def __len__(self) -> int:
        return len(list(self._spans()))

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, rows, window length) of each batch."""
        T = self.context_length
        targets = len(self.tokens) - 1
        full = targets // T
        for row in range(0, full, self.batch_size):
            yield row * T, min(self.batch_size, full - row), T
        if targets % T:
            yield full * T, 1, targets % T

    def __iter__(self) -> Iterator[Batch]:
        for start, rows, T in self._spans():
            span = torch.from_numpy(self.tokens[start : start + rows * T + 1].astype(np.int64))
            batch = span[:-1].view(rows, T), span[1:].view(rows, T)
            if self.documents is None:
                yield batch
            else:
                numbers = torch.from_numpy(self.documents(start, start + rows * T))
                yield *batch, numbers.view(rows, T)


@dataclass(frozen=True)
class Batches:
    """Batches in memory; Lightning would take a list for several loaders."""

    each: Sequence[Batch]

    def __len__(self) -> int:
        return len(self.each)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.each)
