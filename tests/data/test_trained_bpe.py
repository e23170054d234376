"""A BPE that is trained on the training part of the text, against a trainer of a few lines."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from loading import documents, load, read_sides
from support import TEXT, TRICKY, bpe
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from gptattn.data.bpe import ByteLevelBPE, byte_characters
from gptattn.data.text import PlainText
from gptattn.errors import ConfigError, DataError, UserError

Merges = list[tuple[str, str]]


def by_counting(text: str, vocab_size: int) -> Merges:
    """Train a BPE by counting all pairs anew before every merge.

    The most frequent pair is joined, from the left in every word; of equals, that of the lower ids.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    words = {tuple(word): count for word, count in Counter(word for word, _ in split).items()}
    ids = {character: id for id, character in enumerate(sorted(byte_characters()))}
    merges: Merges = []
    while len(ids) < vocab_size:
        counts: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                counts[pair] += count
        best = min(counts, key=lambda p: (-counts[p], ids[p[0]], ids[p[1]]), default=None)
        if best is None or counts[best] < 2:
            break
        merges.append(best)
        ids.setdefault("".join(best), len(ids))
        words = {joined(word, best): count for word, count in words.items()}
    return merges


def joined(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    parts, rest = [], list(word)
    while rest:
        found = tuple(rest[:2]) == pair
        parts.append("".join(rest[: 1 + found]))
        del rest[: 1 + found]
    return tuple(parts)


def trained(texts: Sequence[Sequence[str]], vocab_size: int) -> Merges:
    """Train on documents in pieces; return the merges that make up to `vocab_size` tokens."""
    tokenizer = ByteLevelBPE(vocab_size=vocab_size + 1)
    while True:
        try:
            tokenizer.fit(lambda side: texts if side == "train" else [])
            return learned(tokenizer)
        except ConfigError as error:  # the text does not give as many
            tokenizer = ByteLevelBPE(vocab_size=int(re.findall(r"at most (\d+)", error.message)[0]))


def learned(tokenizer: ByteLevelBPE) -> Merges:
    return [(first, second) for first, second in tokenizer._merges]


def test_the_commonest_pair_is_joined_first_worked_by_hand() -> None:
    text = "ab abc abc ab\nabc"
    # "ab", " abc", " abc", " ab", "\n", "abc": pairs ab 5, " a" 3, bc 3. Joined: ab. Then of the
    # pairs (Ġ, ab) 3 and (ab, c) 3 that of the lower ids: c is 66 and Ġ 220, ab is 256, so Ġ first.
    # Then (Ġab, c) 2, and (ab, c) 1, which is no pattern.
    assert trained([[text]], 300) == [("a", "b"), ("Ġ", "ab"), ("Ġab", "c")]
    assert trained([[text]], 258) == [("a", "b"), ("Ġ", "ab")]
    # No word goes from one document to the next.
    assert trained([["a"], ["b"], ["a"], ["b"]], 300) == []


def test_the_merges_are_those_of_a_trainer_that_counts_anew() -> None:
    for alphabet in ("ab", "abcde ", "etaoin shrdlu\n", "é≈a "):
        text = "".join(random.Random(alphabet).choices(alphabet, k=400))
        assert trained([[text]], 320) == by_counting(text, 320)
    text = TEXT + TRICKY * 3
    assert trained([[text]], 400) == by_counting(text, 400)


# Each holds out "zqzq", which is a merge at once where it is seen, of a text without it.
HELD_OUT: dict[str, PlainText] = {
    "the tail of a text": documents([TEXT + "zqzq " * 40]),
    "tails of documents": documents([TEXT + "zqzq " * 40, TEXT + "zqzq " * 40]),
    "documents": documents([TEXT, TEXT[:500]], ["zqzq " * 40, TEXT + "zqzq"]),
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_nothing_is_learned_from_held_out_text(name: str, tmp_path: Path) -> None:
    tokenizer = ByteLevelBPE(vocab_size=300)
    data = load(HELD_OUT[name], tmp_path, tokenizer)
    assert "zqzq" in tokenizer.decode(data.val[1:])
    assert not any("z" in a + b or "q" in a + b for a, b in learned(tokenizer))
    shown = tokenizer.decode(data.train[:]).split("<|endoftext|>")
    assert learned(tokenizer) == trained([[text] for text in shown], 299)


def test_ids_are_in_gpt2s_order_and_transformers_reads_the_files(tmp_path: Path) -> None:
    tokenizer = ByteLevelBPE(vocab_size=380)
    data = load(TEXT * 2, tmp_path / "cache", tokenizer)
    lengths = tokenizer.byte_lengths()
    assert len(lengths) == tokenizer.vocab_size == 380
    assert (lengths[:256] == 1).all()
    assert (lengths[256:] > 1).all()
    assert tokenizer.separator().tolist() == [379]
    for name, text in tokenizer.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == 379
    assert theirs(TRICKY)["input_ids"] == tokenizer.encode(TRICKY, "data").tolist()
    assert tokenizer.decode(tokenizer.encode(TRICKY, "data")) == TRICKY
    # Both read it back, and a recorded hash is checked.
    again = ByteLevelBPE(str(tmp_path), tokenizer.settings()["sha256"], 380)
    as_gpt2 = ByteLevelBPE(str(tmp_path))
    assert again.fingerprint() == as_gpt2.fingerprint() == tokenizer.fingerprint()
    assert load(TEXT * 2, tmp_path / "cache", again).train[:].tolist() == data.train[:].tolist()


def test_what_was_learned_is_found_again_with_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ByteLevelBPE(vocab_size=300)
    data = load(TEXT, tmp_path, first)
    monkeypatch.setattr(tokenizers.Tokenizer, "train_from_iterator", None)
    second = ByteLevelBPE(vocab_size=300)
    assert read_sides(load(TEXT, tmp_path, second)) == read_sides(data)
    assert first.settings() == second.settings()
    for text, vocabulary, fraction in ((TEXT, 301, 0.1), (TEXT + "!", 300, 0.1), (TEXT, 300, 0.2)):
        with pytest.raises(TypeError, match="not callable"):  # it would be trained
            load(text, tmp_path, ByteLevelBPE(vocab_size=vocabulary), val_fraction=fraction)


@pytest.mark.parametrize("size", [-1, 0, 256, 65_537])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size: .* give 257 .* to 65,536"):
        ByteLevelBPE(vocab_size=size)


def test_a_text_too_small_for_the_size_says_how_many_it_gives(tmp_path: Path) -> None:
    text = "ab abc abc ab\nabc" + " " * 4  # the tail is two spaces
    said = r"tokenizer\.vocab_size: 261 is more than this text can give; give at most 260, or"
    with pytest.raises(ConfigError, match=said):
        load(text, tmp_path / "cache", ByteLevelBPE(vocab_size=261))
    tokenizer = ByteLevelBPE(vocab_size=260)
    load(text, tmp_path / "cache", tokenizer)
    assert tokenizer.vocab_size == 260
    plain = ByteLevelBPE(vocab_size=257)
    load(text, tmp_path / "cache", plain)
    assert (plain.vocab_size, learned(plain)) == (257, [])
    assert plain.encode("é", "data").tolist() != []


def test_what_is_not_as_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.sha256: this text has other tokens"):
        load(TEXT, tmp_path, ByteLevelBPE(vocab_size=300, sha256="00"))
    folder = str(bpe(tmp_path / "bpe"))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.vocab_size: 300 is not that of .*; give 400"
    ):
        ByteLevelBPE(folder, vocab_size=300)
    with pytest.raises(DataError, match=r"tokenizer\.sha256: .* has other tokens"):
        ByteLevelBPE(folder, "00")
    with pytest.raises(UserError, match=r"tokenizer\.path: .*nowhere is not a folder"):
        ByteLevelBPE("nowhere")


def test_the_separator_is_one_id_that_no_text_has(tmp_path: Path) -> None:
    tokenizer = ByteLevelBPE(vocab_size=300)
    data = load(documents([TEXT, "a<|endoftext|>b " * 40]), tmp_path, tokenizer)
    (end,) = tokenizer.separator().tolist()
    assert np.count_nonzero(data.train[:] == end) == 1
    assert np.count_nonzero(data.val[1:] == end) == 1
