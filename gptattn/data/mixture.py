"""Several texts as the data of one run: each row of a batch comes from one of them."""

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gptattn.data.run_data import Request, RunData, Source
from gptattn.data.sampler import Batch, Batches, draws
from gptattn.data.tokenizer import Tokenizer
from gptattn.data.tokens import TokenSource
from gptattn.errors import ConfigError, UserError


class Mixture(Source):
    """The settings of the texts, by name: those of `conf/data`, and a weight above 0.

    Raises ConfigError for fewer than two texts, or for a bad weight.
    """

    def __init__(self, sources: dict[str, Any] | None) -> None:
        if sources is None or len(sources) < 2:
            raise ConfigError(
                "data.sources",
                "has fewer than two texts; give {NAME:{data:text,path:FILE,weight:1},…}",
            )
        self.weights: dict[str, float] = {}
        self.specs: dict[str, dict[str, Any]] = {}  # the settings of each text
        for name, source in sources.items():
            weight = source.get("weight")
            if not (isinstance(weight, int | float) and 0 < weight < math.inf):
                raise ConfigError(
                    f"data.sources.{name}.weight", f"{weight!r} is not a number above 0; give one"
                )
            self.weights[name] = float(weight)
            # `data` was the name of the text's file.
            self.specs[name] = {k: v for k, v in source.items() if k not in ("weight", "data")}

    def load(self, request: Request) -> "MixtureData":
        if not request.tokenizer.ready:
            raise ConfigError(
                "tokenizer",
                "takes its vocabulary from one text, and a mixture has several; give byte or gpt2, "
                "or bpe with tokenizer.path=RUN",
            )
        sources = {}
        for name, spec in self.specs.items():
            field = f"data.sources.{name}"
            try:
                source = request.make(field, spec)
                if not isinstance(source, TokenSource):
                    raise ConfigError(field, "is not text; a mixture takes only texts")
                sources[name] = source.load(request)
            except UserError as error:
                # The text does not know that it is one of several.
                if error.field == "data.mask_documents":  # of all texts together
                    raise type(error)(error.field, f"{field}: {error.message}") from None
                renamed = re.sub(r"^data\b(?!\.sources)", field, error.field)
                raise type(error)(renamed, error.message) from None
        return MixtureData(sources, self.weights, request.tokenizer)


class MixtureData(RunData):
    """Texts with one tokenizer, validated on all their held-out tokens.

    Which texts the rows of a batch come from is a pure function of (seed, step), drawn with the
    texts' weights.
    """

    def __init__(
        self, sources: Mapping[str, RunData], weights: Mapping[str, float], tokenizer: Tokenizer
    ) -> None:
        self.sources, self.weights, self.tokenizer = sources, weights, tokenizer
        hashes = "\n".join(source.text_hash for source in sources.values())
        self.text_hash = hashlib.sha256(hashes.encode()).hexdigest()
        sizes = [source.val_bytes for source in sources.values()]
        self.val_bytes = None if None in sizes else sum(filter(None, sizes))

    def training_batch(self, seed: int, step: int, batch_size: int, context_length: int) -> Batch:
        chosen = self.chosen(seed, step, batch_size)
        where, parts = [], []
        for number, source in enumerate(self.sources.values()):
            own = np.flatnonzero(chosen == number)
            if len(own):
                where.append(own)
                parts.append(source.training_batch(seed, step, len(own), context_length))
        order = torch.from_numpy(np.concatenate(where).argsort())
        return tuple(torch.cat(each)[order] for each in zip(*parts, strict=True))

    def chosen(self, seed: int, step: int, batch_size: int) -> NDArray[np.int64]:
        """Return the number of the text that each row of a batch comes from [batch_size]."""
        shares = np.array([self.weights[name] for name in self.sources])
        generator = draws(seed, step, stream=1)  # not that of the window starts
        return generator.choice(len(shares), size=batch_size, p=shares / shares.sum())

    def validation(self, batch_size: int, context_length: int) -> Batches:
        return Batches(
            [source.validation(batch_size, context_length) for source in self.sources.values()]
        )

    def facts(self) -> dict[str, Any]:
        each = {name: source.facts() for name, source in self.sources.items()}
        counts = ("train_tokens", "val_tokens")
        sums = {key: sum(facts[key] for facts in each.values()) for key in counts}
        return {**sums, "val_bytes": self.val_bytes, "sources": each}
