"""Where a prompt comes from, and streamed text, id by id, against the text of all ids at once."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support import refuses

from gptattn.data.bpe import ByteLevelBPE
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from gptattn.decode.prompt import read_prompt
from gptattn.decode.text_stream import TextStream

TEXT = "naïve ≈ 𝄞 text"


@pytest.fixture(params=["byte", "char", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, gpt2_files: Path) -> Tokenizer:
    if request.param == "gpt2":
        return ByteLevelBPE(str(gpt2_files))
    return ByteTokenizer() if request.param == "byte" else CharTokenizer(TEXT)


def fed(stream: TextStream, ids: list[int]) -> list[str]:
    return [*map(stream.feed, ids), stream.end()]


def test_streamed_text_is_the_text_of_all_ids_whatever_bytes_they_make(tokenizer):
    draws = np.random.default_rng(0)
    for _ in range(20):
        ids = draws.integers(0, tokenizer.vocab_size, 40)
        stream = TextStream(tokenizer)
        emitted = fed(stream, ids.tolist())
        assert "".join(emitted) == stream.emitted == tokenizer.decode(ids)


def test_a_character_is_emitted_with_its_last_byte():
    assert fed(TextStream(ByteTokenizer()), list("a≈b".encode())) == ["a", "", "", "≈", "b", ""]
    assert fed(TextStream(ByteTokenizer()), [0x61, 0xE2, 0x89]) == ["a", "", "", "\ufffd"]


def test_neither_the_stop_text_nor_what_follows_is_emitted(tokenizer):
    ids = tokenizer.encode(TEXT + TEXT, "data").tolist()
    for start in range(len(TEXT)):
        for end in range(start + 1, len(TEXT) + 1):
            stop = TEXT[start:end]
            stream = TextStream(tokenizer, stop)
            assert "".join(fed(stream, ids)) == TEXT[: TEXT.index(stop)]
            assert stream.done


def test_text_that_only_begins_like_the_stop_text_is_emitted():
    stream = TextStream(ByteTokenizer(), "aab")
    assert fed(stream, list(b"aaac")) == ["", "", "a", "aac", ""]
    assert fed(TextStream(ByteTokenizer(), "aab"), list(b"xaa")) == ["x", "", "", "aa"]


def test_a_prompt_comes_from_an_argument_a_file_or_stdin(tmp_path, monkeypatch):
    file, binary = tmp_path / "prompt.txt", tmp_path / "binary"
    file.write_text("π list", encoding="utf-8")
    binary.write_bytes(b"a\xff")
    with file.open() as opened:
        monkeypatch.setattr(sys, "stdin", opened)
        texts = [read_prompt("π list", None), read_prompt(None, file), read_prompt("-", None)]
    assert texts == ["π list"] * 3
    for prompt, given, said, code in (
        (None, None, "prompt: prompt=", 2),
        ("a", file, "prompt: prompt=", 2),
        ("", None, "prompt: empty", 3),
        (None, tmp_path / "none", "prompt_file: No such file", 3),
        (None, binary, "prompt_file: UTF-8", 3),
    ):
        with refuses(said, code):
            read_prompt(prompt, given)
