"""Texts, tokenizers, token files, and which tokens a batch holds."""

import hashlib
import io
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gptattn.data.sampler import TrainingStream, ValidationSet, training_batch, window_starts
from gptattn.data.text import SHAKESPEARE_SHA256, cache_folder, pydocs, shakespeare, text
from gptattn.data.token_files import TokenFile
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, encode_prompt
from gptattn.data.tokens import TokenData, load_tokens
from gptattn.errors import ConfigError, DataError, UserError
from gptattn.training.datamodule import TokenDataModule

MIXED = "Aé≈𝄞\n" * 20  # 1, 2, 3, 4 and 1 bytes in UTF-8
TOKENS = (np.arange(1000) * 7 % 256).astype(np.uint16)


def read(*args: Any, **kwargs: Any) -> list[str]:
    """The documents of a text, each whole."""
    return ["".join(document()) for document in text(*args, **kwargs).documents]


# Texts


def test_pydocs_are_long_prose_and_the_same_every_time() -> None:
    content = pydocs()
    low, high = (460_000, 470_000) if sys.version_info[:2] == (3, 11) else (300_000, 2_000_000)
    assert low < len(content) < high
    assert "is an immutable sequence" in content or "The standard type hierarchy" in content
    assert content == pydocs()


def test_a_python_without_pydocs_says_which_data_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"data=text data\.path="):
        pydocs()


def test_a_folder_is_its_files_sorted_without_the_hidden_ones(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": "second",
        "a.txt": "first",
        "c/d.md": "third",
        ".hidden.txt": "no",
        ".git/e.txt": "no",
        "c/.f": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read(str(tmp_path)) == ["first", "second", "third"]
    assert read(str(tmp_path), pattern="**/*.md") == ["third"]
    assert read(str(tmp_path / "a.txt")) == ["first"]


def test_a_folder_below_a_hidden_one_is_read_when_named(tmp_path: Path) -> None:
    (tmp_path / ".notes").mkdir()
    (tmp_path / ".notes" / "a.txt").write_text("seen")
    assert read(str(tmp_path / ".notes")) == ["seen"]


def test_a_path_may_begin_with_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "book.txt").write_text("at home")
    assert read("~/book.txt") == ["at home"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"text\0more", "binary (NUL at byte 4)"),
        (b"caf\xe9 and more", "not UTF-8 (byte 0xe9 at offset 3)"),
        (b"\xef\xbb\xbf\xff", "byte 0xff at offset 3"),
        (b"cut \xe2\x89", "at offset 4"),
    ],
)
def test_a_file_that_is_no_text_is_refused_and_the_offset_named(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "book.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError) as error:
        read(str(file))
    assert error.value.field == "data.path"
    assert said in error.value.message
    assert str(file) in error.value.message


def test_a_bad_file_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"b\.bin is binary"):
        read(str(tmp_path))


def test_no_path_no_matching_file_and_no_regular_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: is not set"):
        text(None)
    with pytest.raises(DataError, match="no file below"):
        text(str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"data\.pattern=\*\.md"):
        text(str(tmp_path), pattern="*.md")
    with pytest.raises(DataError, match="not a regular file"):
        text(os.devnull)


@pytest.mark.parametrize("pattern", ["/*", "../*", ""])
def test_a_pattern_that_leaves_the_folder_is_the_users_mistake(
    tmp_path: Path, pattern: str
) -> None:
    (tmp_path / "outside.txt").write_text("outside")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("text")
    # A ValueError of a target becomes a ConfigError in build.py.
    with pytest.raises((UserError, ValueError)):
        text(str(tmp_path / "folder"), pattern=pattern)


def test_shakespeare_with_another_sha256_is_refused_and_both_are_named(tmp_path: Path) -> None:
    file = tmp_path / "input.txt"
    file.write_text("First Citizen:\n")
    with pytest.raises(DataError, match=r"data\.path: sha256 is [0-9a-f]{64}") as error:
        shakespeare(str(file))
    assert SHAKESPEARE_SHA256 in error.value.message
    assert hashlib.sha256(b"First Citizen:\n").hexdigest() in error.value.message


def test_the_canonical_shakespeare_is_accepted() -> None:
    path = os.environ.get("GPTATTN_SHAKESPEARE")
    if path is None:
        pytest.skip("GPTATTN_SHAKESPEARE does not name the file")
    assert len(shakespeare(path)) == 1_115_394


def test_a_failed_download_says_what_to_do_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(DataError, match=r"data\.path=FILE"):
        shakespeare(None, cache_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_download_that_is_not_the_canonical_text_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **k: io.BytesIO(b"log in first"))
    with pytest.raises(DataError, match="sha256"):
        shakespeare(None, cache_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_cache_folder_is_the_one_given_or_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("~/mine") == tmp_path / "mine"
    assert cache_folder(None) == tmp_path / "xdg" / "gptattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == tmp_path / ".cache" / "gptattn"


# Tokenizers


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer(), CharTokenizer("𝄞≈éA\n")])
def test_decoding_what_was_encoded_gives_the_text_back(tokenizer: Tokenizer) -> None:
    tokenizer.fit(MIXED)
    ids = tokenizer.encode(MIXED, "data")
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == MIXED
    assert tokenizer.byte_lengths()[ids].sum() == len(MIXED.encode())


def test_byte_ids_are_the_bytes_of_utf8() -> None:
    assert ByteTokenizer().encode("é\n", "data").tolist() == [0xC3, 0xA9, 0x0A]
    assert ByteTokenizer().decode(np.array([0x41, 0xC3])) == "A\ufffd"


def test_char_ids_number_the_characters_by_code_point() -> None:
    tokenizer = CharTokenizer()
    tokenizer.fit("cabac")
    assert tokenizer.vocab_size == 3
    assert tokenizer.encode("cab", "data").tolist() == [2, 0, 1]


def test_char_byte_lengths_are_those_of_utf8() -> None:
    # The last character of each length, and the first of the next.
    characters = [chr(c) for c in (0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF)]
    tokenizer = CharTokenizer("".join(characters))
    assert tokenizer.byte_lengths().tolist() == [len(c.encode()) for c in characters]


def test_an_unknown_character_is_named_with_its_offset_and_field() -> None:
    with pytest.raises(DataError) as error:
        CharTokenizer("abc").encode("abcaéb", "sample.prompt")
    assert error.value.field == "sample.prompt"
    assert "'é' (U+00E9) at offset 4" in error.value.message
    assert "tokenizer=byte" in error.value.message


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab")])
def test_a_prompt_that_is_not_unicode_is_the_users_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"sample\.prompt"):
        encode_prompt(tokenizer, "ab\udcff")


def test_given_characters_are_kept_and_none_are_refused() -> None:
    tokenizer = CharTokenizer("ab")
    tokenizer.fit("abc")
    assert tokenizer.vocab_size == 2
    with pytest.raises(DataError, match=r"tokenizer\.characters"):
        CharTokenizer("")


def test_more_characters_than_ids_of_16_bits_are_refused() -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x12000)]))
    with pytest.raises(DataError, match="more than 65,536; use tokenizer=byte"):
        CharTokenizer().fit(everything)


def test_an_empty_prompt_becomes_a_line_break() -> None:
    assert encode_prompt(ByteTokenizer(), "").tolist() == [10]


def test_tokenizers_with_other_ids_have_other_fingerprints() -> None:
    tokenizers = ByteTokenizer(), CharTokenizer("ab"), CharTokenizer("abc"), CharTokenizer("byte")
    assert len({tokenizer.fingerprint() for tokenizer in tokenizers}) == 4
    assert CharTokenizer("ba").fingerprint() == CharTokenizer("ab").fingerprint()


# Token files


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
    assert (first.encoded, second.encoded) == (1, 0)
    assert one.train[:].tolist() == two.train[:].tolist()
    assert one.val[:].tolist() == two.val[:].tolist()
    assert isinstance(two.train, TokenFile)


def test_the_token_file_holds_the_tokens_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    load(MIXED, tmp_path / "new", ByteTokenizer())
    (file,) = (tmp_path / "new").iterdir()
    assert np.fromfile(file, dtype="<u2").tolist() == list(MIXED.encode())


def test_another_text_or_tokenizer_has_another_file(tmp_path: Path) -> None:
    for content, tokenizer in [
        (MIXED, ByteTokenizer()),
        (MIXED + "x", ByteTokenizer()),
        (MIXED, CharTokenizer()),
        (MIXED, CharTokenizer(MIXED + "x")),
    ]:
        load(content, tmp_path, tokenizer)
    assert len(list(tmp_path.iterdir())) == 4


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
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    file.unlink()  # the first load keeps the old file
    file.write_bytes(content)
    again = load(MIXED, tmp_path, ByteTokenizer())
    assert [f.read_bytes() for f in tmp_path.iterdir()] == [before]
    assert again.train[:].tolist() == whole.train[:].tolist()


def test_the_tail_is_held_out_with_one_token_of_context(tmp_path: Path) -> None:
    content = "".join(chr(33 + i % 90) for i in range(95)) + "é≈é≈é"
    data = load(content, tmp_path, CharTokenizer())
    decode = data.tokenizer.decode
    assert decode(data.train[:]) == content[:90]
    assert decode(data.val[:]) == content[89:]
    assert data.val_bytes == len(content[90:].encode()) == 5 + 2 + 3 + 2 + 3 + 2


# Batches


def test_window_starts_reach_the_first_and_the_last_window_evenly() -> None:
    starts = np.concatenate([window_starts(3, step, 50, 5) for step in range(100)])
    counts = np.bincount(starts)
    assert len(counts) == 5
    # 1,000 of each are expected; the standard deviation is 28.
    assert (abs(counts - 1000) < 6 * 28).all()


def test_every_window_can_be_drawn_and_none_beyond_the_text() -> None:
    tokens = np.arange(9, dtype=np.uint16)
    ids, targets = training_batch(tokens, seed=0, step=0, batch_size=200, context_length=4)
    assert sorted(set(ids[:, 0].tolist())) == [0, 1, 2, 3, 4]
    assert targets.max() == 8


def test_the_one_window_of_the_shortest_text_is_drawn() -> None:
    ids, targets = training_batch(np.arange(5, dtype=np.uint16), 0, 0, 2, context_length=4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert targets.tolist() == [[1, 2, 3, 4]] * 2


def test_targets_are_the_tokens_that_follow() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    ids, targets = training_batch(tokens, seed=1, step=2, batch_size=5, context_length=7)
    assert ids.shape == targets.shape == (5, 7)
    assert ids.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, ids + 1)
    assert torch.equal(ids[:, 1:], ids[:, :-1] + 1)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    def batch(seed: int, step: int) -> list[list[int]]:
        return training_batch(TOKENS, seed, step, 4, 8)[0].tolist()

    before = [batch(1, step) for step in range(4)]
    np.random.seed(5)  # the global generators must have no say
    torch.manual_seed(5)
    assert [batch(1, step) for step in (3, 2, 1, 0)] == before[::-1]
    assert len({str(batch(seed, step)) for seed in range(3) for step in range(3)}) == 9


def take(stream: Iterable[tuple[torch.Tensor, torch.Tensor]], count: int) -> list[list[list[int]]]:
    return [torch.stack(batch).tolist() for batch in islice(iter(stream), count)]


def test_a_stream_begun_at_a_step_goes_on_where_another_stopped() -> None:
    whole = TrainingStream(TOKENS, 1, 4, 8)
    resumed = TrainingStream(TOKENS, 1, 4, 8, first_step=3)
    assert take(resumed, 3) == take(whole, 6)[3:]


def test_the_time_of_making_a_batch_is_reported_once_per_step() -> None:
    times: list[float] = []
    take(TrainingStream(TOKENS, 1, 4, 8, on_made=times.append), 3)
    assert len(times) == 3
    assert min(times) >= 0


@pytest.mark.parametrize("length", [2, 8, 9, 10, 50, 97])
@pytest.mark.parametrize(("batch_size", "context_length"), [(1, 1), (1, 8), (3, 4), (100, 8)])
def test_validation_scores_every_token_of_the_tail_once_and_in_order(
    length: int, batch_size: int, context_length: int
) -> None:
    tail = TOKENS[:length]
    batches = list(ValidationSet(tail, batch_size, context_length))
    ids = [int(token) for batch, _ in batches for token in batch.flatten()]
    targets = [int(token) for _, batch in batches for token in batch.flatten()]
    assert ids == tail[:-1].tolist()
    assert targets == tail[1:].tolist()
    assert len(ValidationSet(tail, batch_size, context_length)) == len(batches)
    assert all(
        len(batch) <= batch_size and batch.shape[1] <= context_length for batch, _ in batches
    )


def test_what_is_left_of_the_tail_is_a_shorter_window_of_its_own() -> None:
    shapes = [tuple(ids.shape) for ids, _ in ValidationSet(TOKENS[:30], 2, 8)]
    assert shapes == [(2, 8), (1, 8), (1, 5)]


def test_the_datamodule_hands_out_streams_of_the_same_windows() -> None:
    data = TokenData(TOKENS[:900], TOKENS[899:], ByteTokenizer(), "hash", 100)
    module = TokenDataModule(data, seed=1, batch_size=4, val_batch_size=2, context_length=8)
    train, val = module.train_dataloader(), module.val_dataloader()
    assert take(train, 4) == take(TrainingStream(TOKENS[:900], 1, 4, 8), 4)
    assert [len(ids) for ids, _ in val] == [2] * 6 + [1]
