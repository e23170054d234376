"""Tokenizers of bytes and of characters: there and back, their ids, and what they refuse."""

import numpy as np
import pytest
from support import MIXED, refuses

from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Piece, TaskIds, encode_prompt


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer(), CharTokenizer("𝄞≈éA\n")])
def test_decoding_what_was_encoded_gives_the_text_back(tokenizer):
    tokenizer.fit([Piece(0, "train", MIXED)])
    ids = tokenizer.encode(MIXED, "data")
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == MIXED
    assert tokenizer.byte_lengths()[ids].sum() == len(MIXED.encode())


def test_char_ids_number_the_characters_by_code_point():
    tokenizer = CharTokenizer()
    tokenizer.fit([Piece(0, "train", "ca"), Piece(0, "val", "bac")])
    assert tokenizer.vocab_size == 3
    assert tokenizer.encode("cab", "data").tolist() == [2, 0, 1]
    tokenizer.fit([Piece(0, "train", "abcd")])
    assert tokenizer.vocab_size == 3  # characters that it has are kept
    # The last character of each length in UTF-8, and the first of the next.
    characters = [chr(c) for c in (0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF)]
    lengths = CharTokenizer("".join(characters)).byte_lengths()
    assert lengths.tolist() == [len(c.encode()) for c in characters]


def test_an_unknown_character_is_named_with_its_place_and_field():
    with refuses("sample.prompt: 'é' (U+00E9), after 'abca'", 3):
        CharTokenizer("abc").encode("abcaéb", "sample.prompt")


def test_byte_ids_are_the_bytes_of_utf8_and_an_empty_prompt_a_line_feed():
    assert ByteTokenizer().encode("é\n", "data").tolist() == [0xC3, 0xA9, 0x0A]
    assert ByteTokenizer().decode(np.array([0x41, 0xC3])) == "A\ufffd"
    assert encode_prompt(ByteTokenizer(), "").tolist() == [10]
    with refuses("sample.prompt: offset 2", 3):
        encode_prompt(ByteTokenizer(), "ab\udcff")
    with refuses("prompt: no tokenizer", 3):
        TaskIds().encode("Once", "prompt")


def test_tokenizers_with_other_ids_have_other_fingerprints():
    tokenizers = ByteTokenizer(), CharTokenizer("ab"), CharTokenizer("abc"), CharTokenizer("byte")
    assert len({tokenizer.fingerprint() for tokenizer in tokenizers}) == 4
    assert CharTokenizer("ba").fingerprint() == CharTokenizer("ab").fingerprint()
