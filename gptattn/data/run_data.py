"""A run's request for data, and the data it gets."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptattn.data.sampler import Batch
from gptattn.data.tokenizer import Tokenizer


class RunData(ABC):
    """Batches of training and validation, the same for every variant.

    `text_hash` and `tokenizer` identify the content: runs are comparable only if both agree.
    """

    tokenizer: Tokenizer
    text_hash: str
    val_bytes: int | None  # UTF-8 bytes that the scored tokens stand for; None: there is no text
    val_limit: int | None = None  # tokens to score, if some are left out
    scored: float = 1.0  # share of the training targets that are scored; the others are IGNORED
    slices: tuple[str, ...] = ()  # kinds of questions; a validation's batch ends with their labels

    @abstractmethod
    def training_batch(self, seed: int, step: int, batch_size: int, context_length: int) -> Batch:
        """Return the batch of optimizer step `step`, a pure function of (seed, step)."""

    @abstractmethod
    def validation(self, batch_size: int, context_length: int) -> Iterable[Batch]:
        """Return the batches of a validation, the same for every seed."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return facts about the data for the run's record, besides hash and tokenizer."""

    def opening(self, context_length: int, tokens: int) -> tuple[Tensor, Tensor | None]:
        """Return about the first `tokens` ids of the validation, in rows [B, T].

        The second value is each token's document number [B, T], if documents are kept apart.
        """
        T = min(tokens, context_length)
        ids, _, *documents = next(iter(self.validation(max(1, tokens // T), T)))
        return ids, documents[0] if documents else None


@dataclass(frozen=True)
class Request:
    """What a run needs from its source of data."""

    tokenizer: Tokenizer
    context_length: int
    val_fraction: float  # to hold out, unless the source decides
    mask_documents: bool  # batches number their documents
    cache: Path  # folder for token files
    data_name: str  # in conf/data, for messages
    tokenizer_name: str  # in conf/tokenizer
    val_tokens: int | None = None  # the most to score; None: all that are held out


class Source(ABC):
    """Where data comes from: the `_target_` of a file in conf/data."""

    @abstractmethod
    def load(self, request: Request) -> RunData:
        """Return the data of a run.

        Raises DataError or ConfigError, naming the field, or DiskError if the cache cannot be used.
        """
