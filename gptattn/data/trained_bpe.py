"""A byte-level BPE that is trained on the training part of a run's text."""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptattn.data.bpe import PIECE_CHARS, ByteLevelBPE, between_words, gpt2_words
from gptattn.data.bpe_files import BPE, byte_characters, of_merges
from gptattn.data.token_files import cache_errors
from gptattn.data.tokenizer import MAX_VOCABULARY
from gptattn.errors import ConfigError, DataError
from gptattn.machine.disk import write_atomically

LEAST = 257  # the bytes and the end of text
LEAST_COUNT = 2  # of a pair: a merge that helps once is no pattern
LARGE = 5_000_000  # bytes of text, which take a second or more


class TrainedBPE(ByteLevelBPE):
    """`vocab_size` ids: the bytes, the commonest pairs of the training part, and the end of text.

    Pairs are joined within GPT-2's words, the most frequent first; of equally frequent pairs, the
    one with the lower ids. With `path`, a folder as for GPT2Tokenizer, nothing is learned, and the
    tokenizer is the one that is there. Raises ConfigError for a size that is out of range, that the
    text does not give, or that the folder's tokenizer does not have; DataError if the tokens' hash
    is not `sha256`. Source: Sennrich et al. 2016, arXiv:1508.07909, sec. 3.2, on bytes as in
    Radford et al. 2019, sec. 2.2.
    """

    def __init__(self, vocab_size: int, path: str | None = None, sha256: str | None = None) -> None:
        if not LEAST <= vocab_size <= MAX_VOCABULARY:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{vocab_size} is out of range; give {LEAST} (the bytes and the end of text) to "
                f"{MAX_VOCABULARY:,}",
            )
        super().__init__()
        self._recorded, self._folder = sha256, self._read(path, sha256) if path else None
        if self._folder is not None and self.vocab_size != vocab_size:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{vocab_size:,} is not that of {self._folder}; give {self.vocab_size}",
            )
        self.vocab_size = vocab_size

    @property
    def ready(self) -> bool:
        return self._folder is not None

    def learn(
        self, documents: Iterable[Iterable[str]], size: int, content: str, cache: Path
    ) -> None:
        if self._folder is not None:
            return
        with cache_errors(cache):
            self._take(self._kept(cache, content) or self._learned(documents, size, content, cache))
        if self._recorded not in (None, self._sha256):
            raise DataError(
                "tokenizer.sha256",
                "this text gives other tokens than the recorded ones; give tokenizer.path=RUN with "
                "the recorded ones, or tokenizer.sha256=null to use these",
            )

    def settings(self) -> dict[str, Any]:
        path = None if self._folder is None else str(self._folder)
        return {"vocab_size": self.vocab_size, "path": path, "sha256": self._sha256}

    def _key(self, content: str) -> str:
        import tokenizers

        made_of = ["bpe", tokenizers.__version__, str(self.vocab_size), str(LEAST_COUNT), content]
        return hashlib.sha256("\0".join(made_of).encode()).hexdigest()

    def _kept(self, cache: Path, content: str) -> BPE | None:
        """Return what an earlier run learned and left in the cache, if it is there and intact."""
        for file in cache.glob(f"{self._key(content)}-*.merges"):
            try:
                raw = file.read_bytes()
                same = hashlib.sha256(raw).hexdigest() == file.stem.rpartition("-")[2]
                bpe = of_merges(raw.decode())
            except (OSError, ValueError):
                continue
            if same and len(bpe.vocab) == self.vocab_size:
                return bpe
        return None

    def _learned(
        self, documents: Iterable[Iterable[str]], size: int, content: str, cache: Path
    ) -> BPE:
        if size >= LARGE:
            print(
                f"tokenizer: learning {self.vocab_size:,} tokens from {size / 1e6:,.0f} MB of text",
                file=sys.stderr,
                flush=True,
            )
        merges = "".join(f"{a} {b}\n" for a, b in trained(documents, self.vocab_size - 1))
        bpe = of_merges(merges)
        if len(bpe.vocab) < self.vocab_size:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{self.vocab_size:,} is more than this text can give; give at most "
                f"{len(bpe.vocab)}, or a longer text",
            )
        raw = merges.encode()
        name = f"{self._key(content)}-{hashlib.sha256(raw).hexdigest()}.merges"
        write_atomically(cache / name, lambda file: file.write(raw))
        return bpe


def trained(documents: Iterable[Iterable[str]], vocab_size: int) -> list[tuple[str, str]]:
    """Return the merges, in byte characters, that make up to `vocab_size` tokens with the bytes.

    The documents are read in pieces; no word goes from one to the next.
    """
    from tokenizers import Tokenizer, models, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = gpt2_words()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=LEAST_COUNT,
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    words = (piece for document in documents for piece in between_words(document, PIECE_CHARS))
    library.train_from_iterator(words, trainer)
    return [(a, b) for a, b in json.loads(library.to_str())["model"]["merges"]]
