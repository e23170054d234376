"""What a run asks of its data, and what it gets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptattn.data.sampler import Batch, Rows
from gptattn.data.tokenizer import Tokenizer
from gptattn.errors import ConfigError


class RunData(ABC):
    """Batches of training and validation, the same for every variant.

    `text_hash` and `tokenizer` identify the content: runs are comparable only if both agree.
    """

    tokenizer: Tokenizer
    text_hash: str
    val_bytes: int | None  # UTF-8 bytes that the scored tokens stand for; None: there is no text
    scored: float = 1.0  # share of the targets that are scored; the others are IGNORED

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
        """Return the document number of each token in `opening_rows` [B, T], if kept apart."""
        return None

    @property
    @abstractmethod
    def val_tokens(self) -> int:
        """The number of ids in a validation."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the run's record says about the data besides hash and tokenizer."""


@dataclass(frozen=True)
class Request:
    """What a run asks of its source of data."""

    tokenizer: Tokenizer
    context_length: int
    val_fraction: float  # to hold out, unless the source decides
    mask_documents: bool  # batches number their documents
    cache: Path  # folder for token files
    data_name: str  # in conf/data, for messages
    tokenizer_name: str  # in conf/tokenizer
    make: Callable[[str, dict[str, Any]], "Source"]  # (setting, its value) -> source


@dataclass(frozen=True)
class Side:
    """What the JSON says about the training text, or the held-out text."""

    tokens: int
    documents: int
    bytes: int  # of UTF-8, without separators


@dataclass(frozen=True)
class Index:
    """The JSON beside a token file."""

    text: str  # hash of everything that decides the text and its held-out part
    recipe: str  # the tokenizer's fingerprint before it read the text
    tokenizer: str  # and after
    choice: str  # the tokenizer's name in conf/tokenizer
    settings: dict[str, Any]  # the tokenizer's
    text_sha256: str  # whatever the tokenizer
    sha256: str  # of the ids
    highest: int  # id
    train: Side
    val: Side
    val_start: int  # the first held-out id, which is only context
    val_bytes: int  # of the held-out ids
    facts: dict[str, Any]  # for the run's record


class Source(ABC):
    """Where data comes from: the `_target_` of a file in conf/data."""

    is_text = True  # False: a synthetic task

    @abstractmethod
    def load(self, request: Request) -> RunData:
        """Return the data of a run.

        Raises DataError or ConfigError, naming the field, or DiskError if the cache cannot be used.
        """

    def prepare(self, folder: Path, request: Request) -> Index:
        """Write the token file of a text to `folder`. Raises ConfigError if it is no text."""
        raise ConfigError(
            "data", f"{request.data_name} is not text, and needs no preparation; give a text"
        )
