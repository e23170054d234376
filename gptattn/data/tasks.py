"""Synthetic tasks in `conf/data`, which tell attention mechanisms apart sharply and cheaply.

A task draws rows of ids, and the targets of the scored positions; the others are IGNORED. Which
rows a batch holds is a pure function of (seed, step), as with text.
"""

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from gptattn.data.run_data import Request, RunData, Source
from gptattn.data.sampler import Batch, Batches, make_generator
from gptattn.data.tokenizer import TaskIds, Tokenizer
from gptattn.errors import ConfigError
from gptattn.model.loss import IGNORED

Ids = NDArray[np.int64]
Count = Annotated[int, Meta(ge=1)]
Rows = tuple[Ids, ...]  # ids, targets and, of a task with slices, labels: [rows, T] each
VALIDATION = 2**32  # the seed of the validation's rows, one above the largest of a run
PROBED_ROWS = 1000  # drawn to check whether most rows are held out


@dataclass(frozen=True)
class Task(Source):
    """A synthetic task on ids 0 .. vocab_size - 1, validated on `val_rows` rows.

    Raises ValueError for values that allow no rows of any length.
    """

    special: ClassVar[int] = 0  # ids that are never answers; all others are equally likely

    vocab_size: Count
    val_rows: Count = 1000

    def __post_init__(self) -> None:
        least, _ = self.minimum_sizes()
        if self.vocab_size < least:
            raise ValueError(f"vocab_size={self.vocab_size} is too small; give {least} or more")

    @abstractmethod
    def minimum_sizes(self) -> tuple[int, int]:
        """Return the smallest vocabulary with several answers, and the shortest row."""

    def chance(self) -> float:
        """Return the accuracy of a constant guess."""
        return 1 / (self.vocab_size - self.special)

    def slices(self) -> tuple[str, ...]:
        """Return a name, not a number, for each kind of question that `draw` labels."""
        return ()

    @abstractmethod
    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        """Draw rows of `length` ids, one target or more in each, and labels if there are slices."""

    def draw_held_out(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        """Draw rows for a validation."""
        return self.draw(generator, rows, length)

    def check_length(self, field: str, length: int) -> None:
        """Raise ConfigError, naming the field, if no row can be this short."""
        _, least = self.minimum_sizes()
        if length < least:
            raise ConfigError(
                field,
                f"{length} is too short for {type(self).__name__}: a row has at least {least} ids; "
                "give a longer one, or an easier task",
            )

    def load(self, request: Request) -> "TaskData":
        length, tokenizer = request.context_length, request.tokenizer
        self.check_length("model.context_length", length)
        if not isinstance(tokenizer, TaskIds):
            raise ConfigError(
                "tokenizer",
                f"{request.data_name} has its own ids and no text; leave the tokenizer out",
            )
        tokenizer.vocab_size = self.vocab_size
        return TaskData(self, length, tokenizer)


@dataclass(frozen=True)
class Recall(Task):
    """Multi-query associative recall: pairs of key and value, then keys that ask for the values.

    An example with three pairs; `.` is a random id (id 0 with `blanks`), and scored targets are
    below:

        A 4 B 3 C 6 . . B . A . . . C .
                        3   4       6

    Keys are from the lower half of the vocabulary, values from the upper; a row repeats none. The
    distance from the pairs to a key's question follows a power law: most are near, some far.
    With several numbers of `pairs`, each row draws one, which labels its questions.
    Chance: 1 / values, and 1 / pairs for a guess among the row's values.
    Source: Arora et al. 2023 (Zoology), arXiv:2312.04927, appendix E.1.
    """

    vocab_size: Count = 8192
    pairs: Count | Annotated[tuple[Count, ...], Meta(min_length=1)] = 4
    power: float = 0.01  # of the gaps' law, p ~ gap ** (power - 1)
    blanks: bool = False

    def numbers(self) -> list[int]:
        """Return the numbers of pairs, from low to high."""
        return sorted({self.pairs} if isinstance(self.pairs, int) else {*self.pairs})

    def minimum_sizes(self) -> tuple[int, int]:
        most = self.numbers()[-1]
        return 2 * most + 2, 4 * most  # a key and a value each, id 0, and one more

    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def slices(self) -> tuple[str, ...]:
        return () if isinstance(self.pairs, int) else tuple(f"pairs_{n}" for n in self.numbers())

    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        half, pairs = self.vocab_size // 2, self.pairs
        if not isinstance(pairs, int):
            drawn = generator.integers(len(self.numbers()), size=rows)
            ids, targets = np.empty((2, rows, length), np.int64)
            for label, n in enumerate(self.numbers()):
                at = np.flatnonzero(drawn == label)
                ids[at], targets[at] = replace(self, pairs=n).draw(generator, len(at), length)
            return ids, targets, np.repeat(drawn[:, None], length, axis=1)
        keys = draw_different(generator, rows, half - 1, pairs) + 1
        values = draw_different(generator, rows, self.vocab_size - half, pairs) + half
        if self.blanks:
            ids = np.zeros((rows, length), np.int64)
        else:
            ids = generator.integers(self.vocab_size, size=(rows, length))
        ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
        places = (length - 2 * pairs) // 2
        law = np.arange(1, places + 1, dtype=np.float64) ** (self.power - 1.0)
        questions = 2 * pairs + 2 * draw_different(generator, rows, places, pairs, law)
        targets = np.full((rows, length), IGNORED)
        np.put_along_axis(ids, questions, keys, axis=1)
        np.put_along_axis(targets, questions, values, axis=1)
        return ids, targets


@dataclass(frozen=True)
class NoisyRecall(Task):
    """Pairs of key and value among pairs of noise; a key that was seen before asks for its value.

    An example with keys A and B, and `.` for noise:

        A 3 . . B 1 A 3 . . . . B 1
                    3           1

    A row gives each key one value; its last key was seen before. Chance: 1 / values. Source:
    Poli et al. 2024 (MAD), arXiv:2403.17844, which trains on every next id.
    """

    vocab_size: Count = 32  # as many keys as values, then the noise
    noise_vocab_size: Count = 16
    noise: Annotated[float, Meta(ge=0, lt=1)] = 0.2  # share of the pairs

    def minimum_sizes(self) -> tuple[int, int]:
        return self.noise_vocab_size + 3, 3  # a key and two values; a pair, and its key again

    def chance(self) -> float:
        return 1 / ((self.vocab_size - self.noise_vocab_size + 1) // 2)

    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        slots, end = (length + 1) // 2, self.vocab_size - self.noise_vocab_size
        ids = generator.integers(end, self.vocab_size, size=(rows, slots, 2))
        values = generator.integers(end // 2, end, size=(rows, end // 2))
        key = generator.integers(end // 2, size=(rows, slots))
        is_pair = generator.random((rows, slots)) >= self.noise
        every, earlier = np.arange(rows), generator.integers(slots - 1, size=rows)
        key[:, -1] = key[every, earlier]
        is_pair[every, earlier] = is_pair[:, -1] = True
        pairs = np.stack([key, np.take_along_axis(values, key, axis=1)], axis=2)
        ids[is_pair] = pairs[is_pair]
        _, first = np.unique(ids[:, :, 0] + every[:, None] * self.vocab_size, return_index=True)
        is_pair.flat[first] = False  # a new key is not a question
        targets = np.full_like(ids, IGNORED)
        targets[is_pair, 0] = pairs[is_pair, 1]
        return ids.reshape(rows, -1)[:, :length], targets.reshape(rows, -1)[:, :length]


@dataclass(frozen=True)
class Copy(Task):
    """Copying: random ids, a separator, and the same ids again, all scored.

        A B C | A B C
              A B C .

    The row is cut before the last id, so that half of the positions are scored.
    Chance: 1 / (vocab_size - 1). Source: Jelassi et al. 2024, arXiv:2402.01032, sec. 2.
    """

    special: ClassVar[int] = 1  # separator
    vocab_size: Count = 64

    def minimum_sizes(self) -> tuple[int, int]:
        return 3, 2  # the separator, and two to choose from

    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        half = length // 2
        content = generator.integers(1, self.vocab_size, size=(rows, half))
        separator = np.zeros((rows, 1), np.int64)
        ids = np.concatenate([content, separator, content], axis=1)[:, :length]
        targets = np.full((rows, length), IGNORED)
        targets[:, half : 2 * half] = content
        return ids, targets


@dataclass(frozen=True)
class Induction(Task):
    """Induction: random ids, one a marker; the last id is the marker again.

    The target is what followed it first.

        . . | D . . . . |
                        D

    Chance: 1 / (vocab_size - 1). Source: Olsson et al. 2022, arXiv:2209.11895; in this form, Fu et
    al. 2023 (H3), arXiv:2212.14052, sec. 3.1.
    """

    special: ClassVar[int] = 1  # marker
    vocab_size: Count = 64

    def minimum_sizes(self) -> tuple[int, int]:
        return 3, 3  # the marker, and two to choose from; two markers, and an id between

    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        ids = generator.integers(1, self.vocab_size, size=(rows, length))
        first = generator.integers(length - 2, size=rows)
        every = np.arange(rows)
        ids[every, first] = ids[:, -1] = 0  # the marker
        targets = np.full((rows, length), IGNORED)
        targets[:, -1] = ids[every, first + 1]
        return ids, targets


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Selective copying: a few ids among blanks, at random places, then given back in order.

        . A . . B C . | | |
                      A B C

    Chance: 1 / (vocab_size - 2).
    Source: Gu and Dao 2023 (Mamba), arXiv:2312.00752, sec. 3.1 and appendix E.1.
    """

    special: ClassVar[int] = 2  # blank and mark
    vocab_size: Count = 18
    tokens: Count = 16  # to give back

    def minimum_sizes(self) -> tuple[int, int]:
        return 4, 2 * self.tokens  # the blank, the mark, and two to choose from

    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        content = generator.integers(2, self.vocab_size, size=(rows, self.tokens))
        places = np.sort(draw_different(generator, rows, length - self.tokens, self.tokens), axis=1)
        ids = np.zeros((rows, length), np.int64)  # blanks
        np.put_along_axis(ids, places, content, axis=1)
        ids[:, -self.tokens :] = 1  # marks
        targets = np.full((rows, length), IGNORED)
        targets[:, -self.tokens :] = content
        return ids, targets


def draw_different(
    generator: np.random.Generator,
    rows: int,
    numbers: int,
    count: int,
    weights: NDArray[np.float64] | None = None,
) -> Ids:
    """Draw `count` different numbers below `numbers` for each row, in random order.

    With `weights` of the numbers, draw one by one without replacement. This is the same as taking
    the shortest of exponential waiting times, each divided by its weight (Efraimidis and Spirakis
    2006, arXiv:1012.0256).
    """
    if weights is None and count**2 <= numbers:  # few of many: redraw rows with a repetition
        drawn = generator.integers(numbers, size=(rows, count))
        repeated = np.arange(rows)
        while len(repeated):
            same = np.diff(np.sort(drawn[repeated], axis=1), axis=1) == 0
            repeated = repeated[same.any(axis=1)]
            drawn[repeated] = generator.integers(numbers, size=(len(repeated), count))
        return drawn
    waits = generator.standard_exponential(size=(rows, numbers))
    if weights is not None:
        waits /= weights
    first = np.argpartition(waits, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(waits, first, axis=1), axis=1)
    return np.take_along_axis(first, order, axis=1)


class TaskData(RunData):
    """Rows of `length` ids: new ones in every training batch, the same ones in every validation.

    Training never uses a validation row. Raises ConfigError if there are too few other rows.
    """

    val_bytes = None

    def __init__(self, task: Task, length: int, tokenizer: Tokenizer) -> None:
        self.task, self.length, self.tokenizer = task, length, tokenizer
        self.slices = task.slices()
        self.val = task.draw_held_out(make_generator(VALIDATION, 0), task.val_rows, length)
        digest = hashlib.sha256(repr(task).encode())
        ids, targets, *_ = task.draw(make_generator(VALIDATION, 1), PROBED_ROWS, length)
        differs = type(task).draw_held_out is not Task.draw_held_out
        for part in (*self.val, *[targets] * differs):
            digest.update(part.astype("<i8").tobytes())
        self.text_hash = digest.hexdigest()
        self.held_out = {row.tobytes() for row in self.val[0]}
        self.scored = float((targets != IGNORED).mean())
        repeated = len(self._held_out_rows(ids))
        if repeated > PROBED_ROWS // 2:
            raise ConfigError(
                "data.val_rows",
                f"{repeated} of {PROBED_ROWS} random rows are held out, because so few rows of "
                f"{length} ids exist; give a longer context, fewer val_rows, or a task with more "
                "ids",
            )

    def _held_out_rows(self, ids: Ids) -> list[int]:
        return [row for row, content in enumerate(ids) if content.tobytes() in self.held_out]

    def training_batch(self, seed: int, step: int, batch_size: int, context_length: int) -> Batch:
        generator = make_generator(seed, step)
        ids, targets, *_ = self.task.draw(generator, batch_size, context_length)
        while rows := self._held_out_rows(ids):
            ids[rows], targets[rows], *_ = self.task.draw(generator, len(rows), context_length)
        return torch.from_numpy(ids), torch.from_numpy(targets)

    def validation(self, batch_size: int, context_length: int) -> Batches:
        rows = self.val
        if context_length != self.length:
            self.task.check_length("validation.lengths", context_length)
            generator = make_generator(VALIDATION, context_length)
            rows = self.task.draw_held_out(generator, self.task.val_rows, context_length)
        parts = (torch.from_numpy(part).split(batch_size) for part in rows)
        return Batches([*zip(*parts, strict=True)])

    def opening(self, context_length: int, tokens: int) -> tuple[Tensor, None]:
        return torch.from_numpy(self.val[0][: max(1, tokens // context_length)]), None

    def facts(self) -> dict[str, Any]:
        return {
            "task": type(self.task).__name__,
            "val_rows": self.task.val_rows,
            "val_tokens": int((self.val[1] != IGNORED).sum()),
            "chance": self.task.chance(),
        }
