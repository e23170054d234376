"""A BPE that is trained on the training part of the text, against a trainer of a few lines."""

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import tokenizers
from support import TEXT, TRICKY, bpe
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from gptattn.data import trained_bpe
from gptattn.data.bpe import GPT2Tokenizer
from gptattn.data.bpe_files import byte_characters
from gptattn.data.corpus import Corpus
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from gptattn.data.tokens import TokenData, load_tokens
from gptattn.data.trained_bpe import TrainedBPE, trained
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


def load(
    source: str | Corpus, cache: Path, tokenizer: Tokenizer, fraction: float = 0.1
) -> TokenData:
    return load_tokens(
        lambda: source, tokenizer, context_length=8, val_fraction=fraction, cache=cache
    )


def corpus(documents: list[str], held_out: list[str] | None = None) -> Corpus:
    return Corpus(*([lambda t=t: iter([t]) for t in side] for side in (documents, held_out or [])))


def learned(tokenizer: TrainedBPE) -> Merges:
    return tokenizer._bpe.merges


def test_the_commonest_pair_is_joined_first_worked_by_hand() -> None:
    text = "ab abc abc ab\nabc"
    # "ab", " abc", " abc", " ab", "\n", "abc": pairs ab 5, " a" 3, bc 3. Joined: ab. Then of the
    # pairs (Ġ, ab) 3 and (ab, c) 3 that of the lower ids: c is 66 and Ġ 220, ab is 256, so Ġ first.
    # Then (Ġab, c) 2, and (ab, c) 1, which is no pattern.
    assert trained([[text]], 300) == [("a", "b"), ("Ġ", "ab"), ("Ġab", "c")]
    assert trained([[text]], 258) == [("a", "b"), ("Ġ", "ab")]
    # No word goes from one document to the next.
    assert trained([["a"], ["b"], ["a"], ["b"]], 300) == []


@pytest.mark.parametrize("alphabet", ["ab", "aab ", "abcde ", "etaoin shrdlu\n", "é≈a "])
def test_the_merges_are_those_of_a_trainer_that_counts_anew(alphabet: str) -> None:
    draw = random.Random(alphabet)
    for length in (20, 60, 300, 1500):
        text = "".join(draw.choices(alphabet, k=length))
        assert trained([[text]], 320) == by_counting(text, 320)


def test_the_merges_of_prose_and_of_hard_cases_are_the_same() -> None:
    text = TEXT + TRICKY * 3
    assert trained([[text]], 600) == by_counting(text, 600)


@pytest.mark.parametrize("length", [1, 3, 50])
def test_a_text_in_pieces_and_under_threads_gives_the_same(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (TEXT + TRICKY) * 3
    pieces = [text[i : i + length] for i in range(0, len(text), length)]
    monkeypatch.setattr(trained_bpe, "PIECE_CHARS", length)
    found = []
    for threads in ("false", "true", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
        found.append(trained([pieces], 500))
    monkeypatch.undo()
    assert found == [trained([[text]], 500)] * 3


# Each holds out "zqzq", which is a merge at once where it is seen, of a text without it.
HELD_OUT: dict[str, Callable[[], str | Corpus]] = {
    "the tail of a text": lambda: TEXT + "zqzq " * 40,
    "tails of documents": lambda: corpus([TEXT + "zqzq " * 40, TEXT + "zqzq " * 40]),
    "documents": lambda: corpus([TEXT, TEXT[:500]], ["zqzq " * 40, TEXT + "zqzq"]),
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_nothing_is_learned_from_held_out_text(name: str, tmp_path: Path) -> None:
    tokenizer = TrainedBPE(300)
    data = load(HELD_OUT[name](), tmp_path, tokenizer)
    assert "zqzq" in tokenizer.decode(data.val[1:])
    assert not any("z" in a + b or "q" in a + b for a, b in learned(tokenizer))
    shown = tokenizer.decode(data.train[:]).split("<|endoftext|>")
    assert learned(tokenizer) == trained([[text] for text in shown], 299)


def test_ids_are_in_gpt2s_order_and_transformers_reads_the_files(tmp_path: Path) -> None:
    tokenizer = TrainedBPE(380)
    data = load(TEXT * 2, tmp_path / "cache", tokenizer)
    lengths = tokenizer.byte_lengths()
    assert len(lengths) == tokenizer.vocab_size == 380
    assert (lengths[:256] == 1).all()
    assert (lengths[256:] > 1).all()
    assert tokenizer.separator()[1].tolist() == [379]
    for name, text in tokenizer.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == 379
    assert theirs(TRICKY)["input_ids"] == tokenizer.encode(TRICKY, "data").tolist()
    assert tokenizer.decode(tokenizer.encode(TRICKY, "data")) == TRICKY
    # Both read it back, and a recorded hash is checked.
    again = TrainedBPE(380, str(tmp_path), tokenizer.settings()["sha256"])
    as_gpt2 = GPT2Tokenizer(str(tmp_path))
    assert again.fingerprint() == as_gpt2.fingerprint() == tokenizer.fingerprint()
    assert load(TEXT * 2, tmp_path / "cache", again).train[:].tolist() == data.train[:].tolist()


def test_what_was_learned_is_kept_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def counting(documents: object, vocab_size: int) -> Merges:
        counted.append(vocab_size)
        return trained(documents, vocab_size)  # type: ignore[arg-type]

    monkeypatch.setattr(trained_bpe, "trained", counting)
    first, second = TrainedBPE(300), TrainedBPE(300)
    for tokenizer in (first, second):
        load(TEXT, tmp_path, tokenizer)
    assert counted == [299]
    assert first.settings() == second.settings()
    load(TEXT, tmp_path, TrainedBPE(301))
    load(TEXT + "!", tmp_path, TrainedBPE(300))
    load(TEXT, tmp_path, TrainedBPE(300), fraction=0.2)
    load(corpus([TEXT, TEXT]), tmp_path, TrainedBPE(300))
    assert len(counted) == 5
    monkeypatch.setattr(tokenizers, "__version__", "another")
    load(TEXT, tmp_path, TrainedBPE(300))
    assert len(counted) == 6


@pytest.mark.parametrize("content", [b"", b"a b\n", b"a b c\n", b"q q\xff\n", None])
def test_damage_in_the_cache_is_learned_anew(content: bytes | None, tmp_path: Path) -> None:
    whole = TrainedBPE(300)
    load(TEXT, tmp_path, whole)
    (file,) = tmp_path.glob("*.merges")
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    # Their author can supply a hash that fits.
    for planted in (b"a b\n", b"q q q\n", b"\xff"):
        name = f"{file.stem[:64]}-{hashlib.sha256(planted).hexdigest()}.merges"
        (tmp_path / name).write_bytes(planted)
    again = TrainedBPE(300)
    load(TEXT, tmp_path, again)
    assert again.settings() == whole.settings()
    assert file.read_bytes() == before


@pytest.mark.parametrize("source", [TEXT * 3, corpus([TEXT, "≈ π" * 30, "x" * 9])])
def test_bits_per_byte_of_all_tokenizers_are_of_the_same_bytes(
    source: str | Corpus, tmp_path: Path
) -> None:
    gpt2 = GPT2Tokenizer(str(bpe(tmp_path / "bpe")))
    found = [
        load(source, tmp_path / "cache", tokenizer)
        for tokenizer in (ByteTokenizer(), CharTokenizer(), gpt2, TrainedBPE(270), TrainedBPE(310))
    ]
    scored = [d.tokenizer.decode(d.val[1:]).replace("<|endoftext|>", "\n\n") for d in found]
    assert scored == [scored[0]] * 5
    assert {d.val_bytes for d in found} == {len(scored[0].encode())}
    assert len({d.text_hash for d in found}) == 1
    assert len({d.val_tokens for d in found}) == 5


def test_a_large_text_is_told_once_and_a_small_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(TEXT, tmp_path, TrainedBPE(300))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(trained_bpe, "LARGE", 10)
    for _ in range(2):
        load(TEXT * 1000, tmp_path, TrainedBPE(300))
    assert capsys.readouterr() == ("", "tokenizer: learning 300 tokens from 2 MB of text\n")


@pytest.mark.parametrize("size", [-1, 0, 256, 65_537])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size: .* give 257 .* to 65,536"):
        TrainedBPE(size)


def test_a_text_too_small_for_the_size_says_how_many_it_gives(tmp_path: Path) -> None:
    text = "ab abc abc ab\nabc" + " " * 4  # the tail is two spaces
    said = r"tokenizer\.vocab_size: 261 is more than this text can give; give at most 260, or"
    with pytest.raises(ConfigError, match=said):
        load(text, tmp_path / "cache", TrainedBPE(261))
    assert not (tmp_path / "cache").exists()
    tokenizer = TrainedBPE(260)
    load(text, tmp_path / "cache", tokenizer)
    assert tokenizer.vocab_size == 260
    plain = TrainedBPE(257)
    load(text, tmp_path / "cache", plain)
    assert (plain.vocab_size, learned(plain)) == (257, [])
    assert plain.encode("é", "data").tolist() != []


def test_a_text_that_changes_while_it_is_learned_is_refused(tmp_path: Path) -> None:
    versions = iter(["old " * 50, "new " * 50, "new " * 50])
    changing = Corpus([lambda: iter([next(versions)])])
    with pytest.raises(DataError, match="data: the text changed while it was being read"):
        load(changing, tmp_path / "cache", TrainedBPE(258))
    assert not (tmp_path / "cache").exists()


def test_what_is_not_as_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.sha256: this text gives other tokens"):
        load(TEXT, tmp_path, TrainedBPE(300, sha256="00"))
    folder = str(bpe(tmp_path / "bpe"))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.vocab_size: 300 is not that of .*; give 400"
    ):
        TrainedBPE(300, folder)
    with pytest.raises(DataError, match=r"tokenizer\.sha256: .* has other tokens"):
        TrainedBPE(400, folder, "00")
    with pytest.raises(UserError, match=r"tokenizer\.path: .*nowhere is not a folder"):
        TrainedBPE(400, "nowhere")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'gptattn\[hf\]'"):
        TrainedBPE(300)


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trained_bpe, "write_atomically", refuse)
    with pytest.raises(UserError, match=r"^cache_dir: .* cannot be used \(No space left"):
        load(TEXT, tmp_path, TrainedBPE(300))


def test_the_separator_is_one_id_that_no_text_has(tmp_path: Path) -> None:
    tokenizer = TrainedBPE(300)
    data = load(corpus([TEXT, "a<|endoftext|>b " * 40]), tmp_path, tokenizer)
    (end,) = tokenizer.separator()[1].tolist()
    assert np.count_nonzero(data.train[:] == end) == 1
    assert np.count_nonzero(data.val[1:] == end) == 1
