"""GPT-2's tokenizer against transformers and by hand, its damaged files, and one trained here."""

import random
from pathlib import Path

import numpy as np
import pytest
from loading import load
from support import TEXT, TRICKY, refuses
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers import GPT2Tokenizer as Theirs

from gptattn.build.data import build_tokenizer
from gptattn.data import hf_tokenizer
from gptattn.data.bpe import ByteLevelBPE, byte_characters
from gptattn.data.text import PlainText
from gptattn.data.tokenizer import write_files
from gptattn.settings.compose import settings

BYTES, WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Whitespace()


@pytest.fixture(scope="module")
def theirs(gpt2_files: Path) -> Theirs:
    return Theirs(str(gpt2_files / "vocab.json"), str(gpt2_files / "merges.txt"))


@pytest.fixture(scope="module")
def ours(gpt2_files: Path) -> ByteLevelBPE:
    return ByteLevelBPE(str(gpt2_files))


def hand_made(folder: Path, merges: list[str], **more: int) -> Path:
    """Write a tokenizer.json: bytes as ids 0 to 255, then the tokens that the merges make."""
    tokens = byte_characters() + [merge.replace(" ", "") for merge in merges]
    vocab = {token: id for id, token in enumerate(tokens)} | more
    folder.mkdir(parents=True, exist_ok=True)
    library = Tokenizer(models.BPE(vocab, [tuple(merge.split()) for merge in merges]))
    library.pre_tokenizer = BYTES
    library.save(str(folder / "tokenizer.json"))
    return folder


def test_ids_are_those_of_transformers(theirs, ours):
    found = ours.encode(TRICKY + TEXT, "data").tolist()
    assert found == theirs(TRICKY + TEXT)["input_ids"]
    assert ours.vocab_size == len(theirs) == 400


@pytest.mark.parametrize("length", [1, 7])
def test_a_text_in_pieces_has_the_ids_of_the_whole(length, theirs, ours, monkeypatch):
    monkeypatch.setattr(hf_tokenizer, "PIECE_CHARS", length)
    draw = random.Random(length)
    alphabet = [*TRICKY, *"  \n\n'sdt", "'re", "  ", "<|endoftext|>"]
    text = "".join(draw.choices(alphabet, k=3000))
    pieces = list(ours.cut([text]))
    assert len(pieces) > 20
    found = np.concatenate(ours.encode_batch(pieces))
    assert found.tolist() == theirs(text, split_special_tokens=True)["input_ids"]
    # However the text comes, it is cut at the same places.
    assert list(ours.cut(text)) == pieces
    assert list(ours.cut(["x" * 100 + "\t" * 9])) == ["x" * 100 + "\t" * 9]


def test_decoding_is_that_of_transformers_and_half_a_character_is_u_fffd(theirs, ours):
    ids = ours.encode(TRICKY, "data")
    assert ours.decode(ids) == TRICKY
    assert ours.byte_lengths()[ids].sum() == len(TRICKY.encode())
    for start in range(0, len(ids), 3):
        part = ids[start : start + 4]
        assert ours.decode(part) == theirs.decode(part, clean_up_tokenization_spaces=False)
    smile = ours.encode("😀", "data")  # not in the training text: bytes
    assert len(smile) > 1
    assert set(ours.decode(smile[:-1])) == {"\ufffd"}


def test_special_tokens_stand_for_their_text_and_survive_being_kept(tmp_path):
    source = hand_made(tmp_path / "a", ["a b"], **{"<ü x>": 257})
    tokenizer = ByteLevelBPE(str(source))
    assert tokenizer.byte_lengths()[257] == 6
    assert tokenizer.decode(np.array([256, 257])) == "ab<ü x>"
    (tmp_path / "b").mkdir()
    write_files(tmp_path / "b", tokenizer.files())
    assert ByteLevelBPE(str(tmp_path / "b")).fingerprint() == tokenizer.fingerprint()
    opened = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert len(opened) == 258
    assert opened("ab<ü x>c")["input_ids"] == [256, 257, 99]


def test_settings_make_the_same_tokenizer_and_no_other(tmp_path):
    one = ByteLevelBPE(str(hand_made(tmp_path / "a", ["a b", "b c"])))
    moved = ByteLevelBPE(str(hand_made(tmp_path / "b", ["a b", "b c"])))
    assert one.fingerprint() == moved.fingerprint()
    assert ByteLevelBPE(**one.settings()).settings() == one.settings()
    # The same tokens, but the merges in another order.
    hand_made(tmp_path / "a", ["b c", "a b"], ab=256, bc=257)
    with refuses("tokenizer.sha256: different tokens", 3):
        ByteLevelBPE(**one.settings())
    assert ByteLevelBPE(str(tmp_path / "b"), vocab_size=300).settings()["vocab_size"] == 258


@pytest.mark.parametrize(
    ("vocabulary", "split", "said"),
    [
        ({}, BYTES, ""),  # cut short
        ({"a": 0, "b": 1}, WORDS, "ValueError: it is not a byte-level BPE"),
        ({"a": 0, "b": 2}, BYTES, "ValueError: the ids of its 2 tokens"),
        ({"a": 0, "b": 1}, BYTES, "ValueError: it has no token for 254"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(vocabulary, split, said, tmp_path):
    library = Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = split
    file = tmp_path / "tokenizer.json"
    file.write_text(library.to_str() if vocabulary else library.to_str()[:99])
    with refuses(f"tokenizer.path: {file} cannot be read ({said}", 3):
        ByteLevelBPE(str(tmp_path))


def test_what_has_no_tokenizer_is_the_users_mistake(tmp_path):
    with refuses("tokenizer.path: init_from"):
        ByteLevelBPE()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with refuses("tokenizer.path: no tokenizer.json", 3):
            ByteLevelBPE(str(folder))


# Trained on the training part of a text


# Each holds out "zqzq", which is a merge at once where it is seen, of a text without it.
@pytest.mark.parametrize(
    "source",
    [
        PlainText([TEXT + "zqzq " * 40, TEXT + "zqzq " * 40]),
        PlainText([TEXT, TEXT[:500]], ["zqzq " * 40, TEXT + "zqzq"]),
    ],
    ids=["tails", "documents"],
)
def test_nothing_is_learned_from_held_out_text(source, tmp_path):
    tokenizer = ByteLevelBPE(vocab_size=300)
    data = load(source, tmp_path, tokenizer)
    assert "zqzq" in tokenizer.decode(data.val[1:])
    letters = tokenizer.to_bytes(np.arange(256, 299))  # what was learned
    assert not {*b"zq"} & {*letters}


def test_ids_are_in_gpt2s_order_and_transformers_reads_the_files(tmp_path):
    tokenizer = ByteLevelBPE(vocab_size=380)
    data = load(TEXT * 2, tmp_path / "cache", tokenizer)
    lengths = tokenizer.byte_lengths()
    assert len(lengths) == tokenizer.vocab_size == 380
    assert (lengths[:256] == 1).all()
    assert (lengths[256:] > 1).all()
    assert tokenizer.separator().tolist() == [379]
    write_files(tmp_path, tokenizer.files())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == 379
    assert theirs(TRICKY)["input_ids"] == tokenizer.encode(TRICKY, "data").tolist()
    assert tokenizer.decode(tokenizer.encode(TRICKY, "data")) == TRICKY
    # Both read it back, and a recorded hash is checked.
    again = ByteLevelBPE(str(tmp_path), tokenizer.settings()["sha256"], 380)
    as_gpt2 = ByteLevelBPE(str(tmp_path))
    assert again.fingerprint() == as_gpt2.fingerprint() == tokenizer.fingerprint()
    assert load(TEXT * 2, tmp_path / "cache", again).train[:].tolist() == data.train[:].tolist()


def test_a_size_that_cannot_be_is_refused_with_one_that_can(tmp_path):
    with refuses("tokenizer.vocab_size: 257"):
        build_tokenizer(settings(["tokenizer=bpe", "tokenizer.vocab_size=256"]))
    text = "ab abc abc ab\nabc" + " " * 4  # the tail is two spaces
    with refuses("tokenizer.vocab_size: 260"):
        load(text, tmp_path, ByteLevelBPE(vocab_size=261))
    assert load(text, tmp_path, ByteLevelBPE(vocab_size=260)).tokenizer.vocab_size == 260
