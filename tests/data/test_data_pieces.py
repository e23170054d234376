"""A text of any size is read and encoded in pieces, and slices of its tokens are read from disk."""

import itertools
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import TEXT, TRICKY, bpe

import gptattn.data.bpe as our_bpe
from gptattn.data import text_file, token_files
from gptattn.data.bpe import GPT2Tokenizer
from gptattn.data.corpus import Corpus
from gptattn.data.text import text
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from gptattn.data.tokens import TokenData, load_tokens
from gptattn.errors import DataError, DiskError

MB = 10**6


def load(source: Path | Corpus | str, cache: Path, tokenizer: Tokenizer | None = None) -> TokenData:
    return load_tokens(
        lambda: text(str(source)) if isinstance(source, Path) else source,
        tokenizer or ByteTokenizer(),
        context_length=8,
        val_fraction=0.1,
        cache=cache,
    )


@pytest.fixture(params=["byte", "char", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "gpt2":
        return GPT2Tokenizer(str(bpe(tmp_path / "bpe")))
    return ByteTokenizer() if request.param == "byte" else CharTokenizer()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_a_file_in_pieces_is_the_file(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "≈𝄞é\n\n\nA \n" * 5
    file = tmp_path / "book.txt"
    file.write_bytes(("\ufeff" + plain.replace("\n", "\r\n")).encode())
    monkeypatch.setattr(text_file, "PIECE_BYTES", max(size, 3))  # the byte order mark is one piece
    (document,) = text(str(file)).documents
    pieces = list(document())
    assert "".join(pieces) == "".join(document()) == plain
    assert max(map(len, pieces)) <= max(size, 3) + 1
    file.write_bytes(plain.replace("\n", "\r").encode())
    monkeypatch.setattr(text_file, "PIECE_BYTES", size)
    assert "".join(document()) == plain


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"abcdefgh\xe9 au lait", "0xe9 at offset 8"),
        (b"abcde\xe2\x89", "0xe2 at offset 5"),
        (b"abc\xe2\x89de", "0xe2 at offset 3"),
        (b"abcdefg\0", "NUL at byte 7"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_what_is_no_text_is_named_with_its_offset_in_the_file(
    raw: bytes, said: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_file, "PIECE_BYTES", size)
    (tmp_path / "book.txt").write_bytes(raw)
    with pytest.raises(DataError, match=said):
        load(tmp_path / "book.txt", tmp_path / "cache")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_tokens_of_pieces_are_those_of_the_whole_text(
    size: int, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_file, "PIECE_BYTES", size)
    monkeypatch.setattr(token_files, "PIECE_TOKENS", 11)
    monkeypatch.setattr(our_bpe, "PIECE_CHARS", 50)
    content = "".join(random.Random(size).choices([*TRICKY.replace("\0", ""), TEXT], k=300))
    content = content.replace("\r\n", "\n").replace("\r", "\n")
    (tmp_path / "book.txt").write_bytes(content.encode())
    data = load(tmp_path / "book.txt", tmp_path / "cache", tokenizer)
    raw = content.encode()
    cut = len(raw[: len(raw) - round(0.1 * len(raw))].decode(errors="ignore"))
    head, tail = (
        tokenizer.encode(part, "data").tolist() for part in (content[:cut], content[cut:])
    )
    assert data.train[:].tolist() == head
    assert data.val[:].tolist() == [head[-1], *tail]
    assert data.val_bytes == len(content[cut:].encode())


@pytest.mark.parametrize("part", [1, 3, 10, 1000])
def test_words_are_cut_at_the_same_places_however_the_text_comes(part: int) -> None:
    content = "".join(random.Random(part).choices([*"ab  \n\t'", "word "], k=2000))
    parts = [content[i : i + part] for i in range(0, len(content), part)]
    assert list(our_bpe.between_words(parts, 20)) == list(our_bpe.between_words([content], 20))


def test_a_text_without_an_end_is_encoded_as_it_comes(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_bpe, "PIECE_CHARS", 50)
    words = "words and words "
    tokenizer.fit([words])
    endless = tokenizer.encode_pieces(itertools.repeat(words), "data")
    ids = np.concatenate(list(itertools.islice(endless, 2)))
    assert ids.tolist() == tokenizer.encode(tokenizer.decode(ids), "data").tolist()


@pytest.mark.parametrize("tokenizer", ["byte", "char"], indirect=True)
def test_four_times_the_text_takes_no_more_memory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def peak(lines: int) -> int:
        file = tmp_path / f"{lines}.txt"
        file.write_text("All work and no play makes π a naïve ≈.\n" * lines, encoding="utf-8")
        tracemalloc.start()
        try:
            for _ in ("cold", "warm"):
                load(file, tmp_path / "cache", tokenizer)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few = peak(100_000)  # 4.4 MB
    assert peak(400_000) < few + MB


def test_an_unknown_character_is_named_with_its_offset_in_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_file, "PIECE_BYTES", 16)
    (tmp_path / "book.txt").write_bytes(b"ab" * 100 + b"x" + b"ab" * 100)
    with pytest.raises(DataError, match=r"data: character 'x' \(U\+0078\) at offset 200 is not"):
        load(tmp_path / "book.txt", tmp_path / "cache", CharTokenizer("ab"))


def test_a_text_that_changes_between_two_readings_is_refused_and_not_kept(tmp_path: Path) -> None:
    versions = itertools.chain(["old " * 50], itertools.repeat("new " * 50))

    def document() -> Iterator[str]:
        yield next(versions)

    with pytest.raises(DataError, match="data: the text changed while it was being read"):
        load(Corpus([document]), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data: cannot be written as UTF-8 at offset 2"):
        load("ab\udcff", tmp_path / "cache")


# Token files


def test_a_token_file_that_is_cut_in_use_is_named_in_one_line(tmp_path: Path) -> None:
    data = load("All work and no play.\n" * 99, tmp_path)
    whole = data.train[:].tolist()
    for file in tmp_path.iterdir():
        with file.open("r+b") as cut:
            cut.truncate(100)
    assert data.train[:50].tolist() == whole[:50]
    for tokens in (data.train, data.val):
        with pytest.raises(DiskError, match=r"\.tokens: was cut short") as error:
            tokens[len(tokens) - 5 :]
        assert error.value.exit_code == 7
    assert load("All work and no play.\n" * 99, tmp_path).train[:].tolist() == whole


def test_a_token_file_that_is_removed_in_use_is_still_read(tmp_path: Path) -> None:
    data = load("All work and no play.\n" * 99, tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    assert bytes(data.train[:8].tolist()) == b"All work"


def test_slices_of_a_token_file_are_those_of_an_array(tmp_path: Path) -> None:
    ids = np.arange(40, dtype="<u2")
    ids.tofile(tmp_path / "a")
    tokens, array = token_files.opened(tmp_path / "a").part(7, 33), ids[7:33]
    assert len(tokens) == 26
    for part in (
        slice(None),
        slice(3, 9),
        slice(-4, None),
        slice(20, 99),
        slice(5, 5),
        slice(9, 2),
    ):
        assert tokens[part].tolist() == array[part].tolist()


def test_what_killed_processes_left_in_the_cache_is_removed(tmp_path: Path) -> None:
    a, b = "a" * 64, "b" * 64
    left = [f"{a}-{b}.tokens.{'0' * 16}.part", f"{a}-{'1' * 16}.unnamed.{'0' * 16}.part"]
    for name in [*left, "mine.part"]:
        (tmp_path / name).write_bytes(b"x" * 9)
        os.utime(tmp_path / name, (0, 0))
    load(TEXT, tmp_path)
    assert not any((tmp_path / name).exists() for name in left)
    assert (tmp_path / "mine.part").exists()
