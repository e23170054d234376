"""Which document each token of a batch is of, from the text, the cache or an old cache."""

import hashlib
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support import bpe
from torch import Tensor

from gptattn.data.bpe import GPT2Tokenizer
from gptattn.data.document_starts import numbers_between
from gptattn.data.text import text
from gptattn.data.tokenizer import ByteTokenizer, Tokenizer
from gptattn.data.tokens import TokenData, load_tokens
from gptattn.errors import ConfigError, DiskError

FILES = {"1.txt": "a" * 40, "2.txt": "b" * 5, "3.txt": "c" * 30, "4.txt": "d" * 3}


class CountingTokenizer(ByteTokenizer):
    """Counts the pieces that it encodes."""

    encoded = 0

    def encode_pieces(self, pieces: Iterator[str], field: str) -> Iterator[NDArray[np.uint16]]:
        self.encoded += 1
        return super().encode_pieces(pieces, field)


def written(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def load(
    path: Path,
    tokenizer: Tokenizer | None = None,
    *,
    mask_documents: bool = True,
    val_path: Path | None = None,
    fraction: float = 0.3,
) -> TokenData:
    return load_tokens(
        lambda: text(str(path), val_path=val_path and str(val_path)),
        tokenizer or ByteTokenizer(),
        context_length=8,
        val_fraction=fraction,
        cache=path.parent / "cache",
        mask_documents=mask_documents,
    )


def test_numbers_change_where_a_document_begins_and_count_from_the_first_token() -> None:
    starts = np.array([0, 3, 4, 9])
    assert numbers_between(starts, 0, 11).tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3]
    assert numbers_between(starts, 4, 9).tolist() == [0] * 5
    assert numbers_between(starts, 3, 5).tolist() == [0, 1]
    assert numbers_between(starts, 2, 2).tolist() == []
    assert numbers_between(starts[:0], 5, 7).tolist() == [0, 0]


def told(ids: Tensor, numbers: Tensor, tokenizer: Tokenizer) -> list[str]:
    """The text of each document in a row, in order."""
    pairs = zip(numbers.tolist(), ids.tolist(), strict=True)
    return [
        tokenizer.decode(np.array([i for _, i in group]))
        for _, group in groupby(pairs, key=lambda p: p[0])
    ]


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_a_document_begins_at_its_separator_and_goes_on_to_the_next(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = ByteTokenizer() if kind == "byte" else GPT2Tokenizer(str(bpe(tmp_path / "bpe")))
    separator = "\n\n" if kind == "byte" else "<|endoftext|>"
    data = load(written(tmp_path / "books"), tokenizer)
    seen = set[str]()
    for step in range(20):
        ids, targets, numbers = data.training_batch(3, step, 5, 8)
        assert ids.shape == targets.shape == numbers.shape
        for row, own in zip(ids, numbers, strict=True):
            parts = told(row, own, tokenizer)
            for before, after in pairwise(parts):
                assert separator.startswith(after[: len(separator)])  # a row may end within it
                assert len(before) <= 2 or before[-1] in "abcd"
            letters = ["".join(sorted(set(part) & set("abcd"))) for part in parts]
            if kind == "byte":
                assert all(len(found) <= 1 for found in letters)
            seen.update(letters)
    assert {"a", "c"} <= seen


def test_validation_windows_have_the_documents_of_the_held_out_text(tmp_path: Path) -> None:
    data = load(written(tmp_path / "books"))
    tokens, windows = data.tokenizer.decode(data.val[:]), []
    for ids, _, numbers in data.validation(2, 8):
        windows += [told(*row, data.tokenizer) for row in zip(ids, numbers, strict=True)]
    assert "".join(part for window in windows for part in window) == tokens[:-1]
    for window in windows:
        assert all("\n\n".startswith(part[:2]) for part in window[1:])
        assert all(len({*part} - {"\n"}) <= 1 for part in window)
    assert max(map(len, windows)) > 1
    rows = data.opening_rows(8, 24)
    apart = data.opening_documents(rows)
    assert apart is not None
    opening = [told(*row, data.tokenizer) for row in zip(rows, apart, strict=True)]
    assert opening == windows[: len(opening)]


def test_held_out_documents_are_kept_apart_even_if_there_is_one_to_train_on(
    tmp_path: Path,
) -> None:
    train, val = written(tmp_path / "a", {"1.txt": "a" * 40}), written(tmp_path / "b")
    data = load(train, val_path=val)
    _, _, numbers = data.training_batch(0, 0, 4, 8)
    assert not numbers.any()
    assert max(int(own.max()) for _, _, own in data.validation(4, 8)) > 0


def test_batches_name_documents_only_if_they_are_asked_to(tmp_path: Path) -> None:
    data = load(written(tmp_path / "books"), mask_documents=False)
    assert len(data.training_batch(0, 0, 2, 8)) == 2
    assert {len(batch) for batch in data.validation(2, 8)} == {2}
    assert data.opening_documents(data.opening_rows(8, 24)) is None


def batches(data: TokenData) -> list[list[int]]:
    return [
        x.flatten().tolist()
        for x in (*data.training_batch(1, 2, 4, 8), *next(iter(data.validation(9, 8))))
    ]


@pytest.mark.parametrize("first", [True, False])
def test_starts_come_from_the_cache(first: bool, tmp_path: Path) -> None:
    books, one, two = written(tmp_path / "books"), CountingTokenizer(), CountingTokenizer()
    load(books, one, mask_documents=first)
    again = load(books, two)
    assert one.encoded > 0
    assert two.encoded == 0
    (tmp_path / "cache").rename(tmp_path / "other")
    assert batches(again) == batches(load(books))


@pytest.mark.parametrize("harm", ["missing", "damaged", "beyond"])
def test_starts_that_are_not_intact_are_found_again(harm: str, tmp_path: Path) -> None:
    books = written(tmp_path / "books")
    expected, cache = batches(load(books)), tmp_path / "cache"
    files = sorted(cache.glob("*.starts"))
    assert len(files) == 2  # of the training tokens and of the held-out ones
    for file in files:
        raw = file.read_bytes()
        file.unlink()
        if harm == "damaged":
            file.write_bytes(raw[:-1])
        if harm == "beyond":  # of a longer text, under a hash that fits
            other = np.array([0, 10**6], dtype="<i8").tobytes()
            name = file.stem.rpartition("-")[0]
            (cache / f"{name}-{hashlib.sha256(other).hexdigest()}.starts").write_bytes(other)
    assert batches(load(books)) == expected
    assert len(list(cache.glob("*.starts"))) >= 2
    assert not list(cache.glob("*.unnamed*"))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    books = written(tmp_path / "books")
    load(books)
    for file in (tmp_path / "cache").glob("*.starts"):
        file.unlink()
        file.mkdir()
    with pytest.raises(DiskError, match="cannot be used"):
        load(books)


def test_a_single_document_is_refused_in_one_line(tmp_path: Path) -> None:
    book = written(tmp_path / "books") / "1.txt"
    said = "the text has no two documents to keep apart; leave it out, or give a folder"
    with pytest.raises(ConfigError, match=said) as error:
        load_tokens(
            lambda: text(str(book)),
            ByteTokenizer(),
            context_length=8,
            val_fraction=0.1,
            cache=tmp_path,
            mask_documents=True,
        )
    assert error.value.field == "data.mask_documents"
    assert not list(tmp_path.glob("*.tokens"))
