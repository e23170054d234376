"""Token files: made once, made again when damaged, and split for training and validation."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support import MIXED

from gptattn.data.token_files import TokenFile
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from gptattn.data.tokens import TokenData, load_tokens
from gptattn.errors import ConfigError, DataError


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that it encodes."""

    encoded = 0

    def encode(self, text: str, field: str) -> NDArray[np.uint16]:
        self.encoded += 1
        return super().encode(text, field)


def load(content: str, cache: Path, tokenizer: Tokenizer, context_length: int = 8) -> TokenData:
    return load_tokens(
        lambda: content, tokenizer, context_length=context_length, val_fraction=0.1, cache=cache
    )


def test_a_second_load_does_not_tokenize_again(tmp_path: Path) -> None:
    first, second = CountingTokenizer(), CountingTokenizer()
    one, two = load(MIXED, tmp_path, first), load(MIXED, tmp_path, second)
    assert (first.encoded, second.encoded) == (2, 0)  # what is trained on, and what is held out
    assert one.train[:].tolist() == two.train[:].tolist()
    assert one.val[:].tolist() == two.val[:].tolist()
    assert isinstance(two.train, TokenFile)


def test_two_token_files_hold_the_tokens_and_nothing_lies_beside_them(tmp_path: Path) -> None:
    load(MIXED, tmp_path / "new", ByteTokenizer())
    files = sorted((tmp_path / "new").iterdir(), key=lambda file: file.stat().st_size)
    val, train = (np.fromfile(file, dtype="<u2").tolist() for file in files)
    assert [*train, *val[1:]] == list(MIXED.encode())
    assert val[0] == train[-1]


def test_another_text_or_tokenizer_has_another_file(tmp_path: Path) -> None:
    for content, tokenizer in [
        (MIXED, ByteTokenizer()),
        (MIXED + "x", ByteTokenizer()),
        (MIXED, CharTokenizer()),
        (MIXED, CharTokenizer(MIXED + "x")),
    ]:
        load(content, tmp_path, tokenizer)
    assert len(list(tmp_path.iterdir())) == 4 * 2


def test_a_text_shorter_than_the_context_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    # 100 tokens: 90 of them train, which is one window of 89 and its target.
    assert len(load("x" * 100, tmp_path, ByteTokenizer(), context_length=89).train) == 90
    with pytest.raises(ConfigError) as error:
        load("x" * 100, cache, ByteTokenizer(), context_length=90)
    assert error.value.field == "model.context_length"
    assert "at most 89" in error.value.message
    assert not cache.exists()


def test_an_unknown_character_in_the_text_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data: character 'é'"):
        load(MIXED, tmp_path / "cache", CharTokenizer("A"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"", b"odd", b"even"])
def test_a_damaged_token_file_is_made_anew(tmp_path: Path, content: bytes) -> None:
    whole = load(MIXED, tmp_path, ByteTokenizer())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for name in before:
        (tmp_path / name).unlink()  # the first load keeps the old file
        (tmp_path / name).write_bytes(content)
    again = load(MIXED, tmp_path, ByteTokenizer())
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert again.train[:].tolist() == whole.train[:].tolist()


def test_the_tail_is_held_out_with_one_token_of_context(tmp_path: Path) -> None:
    # 107 bytes, of which 11 are held out; the 12th from the end begins a character of two bytes.
    content = "".join(chr(33 + i % 90) for i in range(95)) + "é≈é≈é"
    assert len(content.encode()) == 107
    for tokenizer in (CharTokenizer(), ByteTokenizer()):
        data = load(content, tmp_path, tokenizer)
        assert tokenizer.decode(data.train[:]) == content[:95]
        assert tokenizer.decode(data.val[:1]) == content[94]
        assert tokenizer.decode(data.val[1:]) == "é≈é≈é"
        assert data.val_bytes == 12
