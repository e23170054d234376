"""State tracking: the answer depends on all ids so far. docs/tasks.md says what it takes."""

from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from typing import Literal

import numpy as np

from gptattn.data.tasks import Count, Ids, Rows, Task
from gptattn.model.loss import IGNORED


@dataclass(frozen=True)
class Permutations(Task):
    """The word problem of a group: random permutations, and at each the product of all so far.

    In S2 this is parity. In S3 the ids are 012, 021, 102, 120, 201, 210 (where the points go):

        1 2 3 1
        1 3 4 2

    Answers are ids too, so the first answer is the first id; 0 is the identity. Products go from
    left to right. Training scores all of them, validation only the last in each row.
    `generators`: what to draw. `transpositions` include the identity, since otherwise the place
    would tell a product's sign. Chance: 1 / 2, 1 / 6 or 1 / 120, in rows of 20 or more. Source:
    Merrill et al. 2024, arXiv:2404.08819; for transpositions Grazzi et al. 2024, arXiv:2411.12537,
    sec. 5.2.
    """

    vocab_size: Count = field(init=False)
    group: Literal["s2", "s3", "s5"] = "s3"
    generators: Literal["all", "transpositions"] = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocab_size", len(_multiply(self.group)[0]))

    def minimum_sizes(self) -> tuple[int, int]:
        return 2, 2

    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        table, moved = _multiply(self.group)
        drawn = np.flatnonzero(moved <= 2) if self.generators == "transpositions" else len(moved)
        ids = generator.choice(drawn, size=(rows, length))
        products, state = np.empty_like(ids), np.zeros(rows, np.int64)
        for place in range(length):
            products[:, place] = state = table[state, ids[:, place]]
        return ids, products

    def draw_held_out(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        ids, targets = self.draw(generator, rows, length)
        targets[:, :-1] = IGNORED
        return ids, targets


@cache
def _multiply(group: str) -> tuple[Ids, Ids]:
    """Return table[first, second] of a group's products, and how many points each element moves."""
    points = np.arange(int(group[1:]))
    elements = np.array([*permutations(points)])
    order = len(points) ** points[::-1]  # sorts elements @ order
    both = elements[:, elements].swapaxes(0, 1)  # [first, second, point]
    return np.searchsorted(elements @ order, both @ order), (elements != points).sum(axis=1)
