"""What a run trains on and is validated with: a text's tokens, or the rows of a synthetic task."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gptattn.data.sampler import Batch, Rows
from gptattn.data.tokenizer import Tokenizer


class RunData(ABC):
    """Batches of training and validation, the same for every variant.

    `text_hash` and `tokenizer` identify the content: runs are comparable only if both agree.
    """

    tokenizer: Tokenizer
    text_hash: str
    val_bytes: int | None  # UTF-8 bytes that the scored tokens stand for; None: a task has no text

    @abstractmethod
    def training_batch(
        self,
        seed: int,
        step: int,
        batch_size: int,
        context_length: int,
        rows: Rows | None = None,
    ) -> Batch:
        """Return the batch of optimizer step `step`, a pure function of (seed, step).

        `rows`: only these of its rows.
        """

    @abstractmethod
    def validation(self, batch_size: int, context_length: int) -> Iterable[Batch]:
        """Return the batches of a validation, the same for every seed."""

    @abstractmethod
    def opening_rows(self, context_length: int, tokens: int) -> Tensor:
        """Return about the first `tokens` ids of the validation, in rows [B, T]."""

    def opening_documents(self, rows: Tensor) -> Tensor | None:
        """Return the number of each token's document in `opening_rows` [B, T], if kept apart."""
        return None

    @property
    @abstractmethod
    def val_tokens(self) -> int:
        """The number of ids that a validation goes through."""

    @property
    @abstractmethod
    def scored(self) -> float:
        """The share of the targets that are scored; the others are IGNORED."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the run's record says of the data, beside hash and tokenizer."""
