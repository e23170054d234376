"""The rows of a synthetic task as the data of a run."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptattn.data.run_data import RunData
from gptattn.data.sampler import Batch
from gptattn.data.tasks import IGNORED, Rows, Task, task_rows
from gptattn.data.tokenizer import Tokenizer

VALIDATION = 2**32  # the seed of the validation's rows, one above the largest of a run


@dataclass(frozen=True)
class TaskData(RunData):
    """Rows of `length` ids, fresh ones in every training batch, and always the same to validate."""

    task: Task
    length: int
    tokenizer: Tokenizer
    val: Rows = field(init=False)
    val_bytes: int | None = field(init=False, default=None)
    text_hash: str = field(init=False)  # of the task and of the validation's rows

    def __post_init__(self) -> None:
        val = task_rows(self.task, VALIDATION, 0, self.task.val_rows, self.length)
        digest = hashlib.sha256(repr(self.task).encode())
        for part in val:
            digest.update(part.astype("<i8").tobytes())
        object.__setattr__(self, "val", val)
        object.__setattr__(self, "text_hash", digest.hexdigest())

    def training_batch(
        self,
        seed: int,
        step: int,
        batch_size: int,
        context_length: int,
        rows: NDArray[np.int64] | None = None,
    ) -> Batch:
        ids, targets = task_rows(self.task, seed, step, batch_size, context_length)
        return _batch((ids, targets) if rows is None else (ids[rows], targets[rows]))

    def validation(self, batch_size: int, context_length: int) -> "TaskRows":
        return TaskRows(self.val, batch_size)

    def opening_rows(self, context_length: int, tokens: int) -> Tensor:
        return torch.from_numpy(self.val[0][: max(1, tokens // self.length)])

    @property
    def val_tokens(self) -> int:
        return self.val[0].size

    @property
    def scored(self) -> float:
        return float((self.val[1] != IGNORED).mean())

    def facts(self) -> dict[str, Any]:
        return {
            "task": type(self.task).__name__,
            "val_rows": self.task.val_rows,
            "val_tokens": int((self.val[1] != IGNORED).sum()),
        }


@dataclass(frozen=True)
class TaskRows:
    """The rows in order, `batch_size` at a time."""

    rows: Rows
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.rows[0]) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.rows[0]), self.batch_size):
            ids, targets = (part[start : start + self.batch_size] for part in self.rows)
            yield _batch((ids, targets))


def _batch(rows: Rows) -> Batch:
    ids, targets = rows
    return torch.from_numpy(ids), torch.from_numpy(targets)
