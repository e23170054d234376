"""Token files: made once, made again when damaged, and split for training and validation."""

import os
import random
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from loading import load, read_sides, request
from support import MIXED, TEXT, TRICKY, refuses

import gptattn.data.hf_tokenizer as our_tokenizer
from gptattn.data import text as our_text
from gptattn.data.bin_files import BinFiles
from gptattn.data.bpe import ByteLevelBPE
from gptattn.data.sampler import DocumentNumbers
from gptattn.data.text import PlainText, TextFiles
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Ids, Tokenizer, write_files
from gptattn.data.tokens import (
    INDEX,
    LOCK,
    STARTS,
    TOKENS,
    TokenData,
    make_tokens,
    number_documents,
)


@pytest.fixture(scope="module")
def gpt2(gpt2_files: Path) -> Tokenizer:
    return ByteLevelBPE(str(gpt2_files))


@pytest.mark.parametrize("make", [CharTokenizer, partial(ByteLevelBPE, vocab_size=300)])
def test_a_vocabulary_of_the_text_is_found_again_with_its_ids(make, tmp_path):
    first, second = make(), make()
    one = load(TEXT, tmp_path / "cache", first)
    (file,) = tmp_path.glob(f"cache/*/{TOKENS}")
    os.utime(file, (1, 1))
    two = load(TEXT, tmp_path / "cache", second)
    assert first.settings() == second.settings()
    # A resumed run has the vocabulary already, and no text need be encoded again.
    write_files(tmp_path, first.files())
    found = {"path": str(tmp_path)} if first.files() else {}
    three = load(TEXT, tmp_path / "cache", type(first)(**first.settings() | found))
    assert file.stat().st_mtime == 1  # the ids were not made again
    assert len(list(tmp_path.glob(f"cache/*/{INDEX}"))) == 1
    assert read_sides(one) == read_sides(two) == read_sides(three)


def test_a_file_that_has_changed_is_read_again(tmp_path):
    file, found = tmp_path / "book.txt", []
    for seconds, text in enumerate((TEXT, TEXT.replace("end", "END"))):
        file.write_text(text)
        os.utime(file, (seconds, seconds))  # the clock of a disk may tick slowly
        found.append(load(TextFiles(str(file)), tmp_path / "cache"))
    assert ["END" in read_sides(data)[0] for data in found] == [False, True]
    assert found[0].text_hash != found[1].text_hash


@pytest.mark.parametrize(
    ("name", "content"), [(TOKENS, b"cut"), (TOKENS, None), (STARTS, None), (INDEX, b"{")]
)
def test_what_is_damaged_or_lost_in_the_cache_is_encoded_again(name, content, tmp_path):
    before = read_sides(load(MIXED, tmp_path))
    (file,) = tmp_path.glob(f"*/{TOKENS}")
    whole = file.read_bytes()
    assert whole == np.array([*MIXED.encode()], dtype="<u2").tobytes()
    assert {f.name for f in file.parent.iterdir()} == {TOKENS, INDEX, STARTS, LOCK}
    file.with_name(name).unlink()
    if content is not None:
        file.with_name(name).write_bytes(content)
    assert read_sides(load(MIXED, tmp_path)) == before
    assert file.read_bytes() == whole


def test_unfinished_token_files_are_refused_and_other_texts_ids_are_kept(tmp_path, monkeypatch):
    to, cache = tmp_path / "to", tmp_path / "cache"
    monkeypatch.setattr(our_text, "BATCH", 1)
    with refuses("data: character", 3):
        make_tokens(PlainText(["abc" * 99, TEXT]), to, request(cache, CharTokenizer("abc\n")))
    with refuses("data.path: *train*.bin", 3):
        load(BinFiles(str(to)), cache)
    index = make_tokens(PlainText([TEXT]), to, request(cache))
    assert load(BinFiles(str(to)), cache).text_hash == index.text_sha256
    with refuses("to: another text"):
        make_tokens(PlainText([TEXT + "x"]), to, request(cache))


def test_a_text_shorter_than_the_context_is_refused(tmp_path):
    # 100 tokens: 90 of them train, which is one window of 89 and its target.
    assert len(load("x" * 100, tmp_path, context_length=89).train) == 90
    with refuses("model.context_length: 89"):
        load("x" * 100, tmp_path, context_length=90)
    with refuses("data: short", 3):
        load("x", tmp_path)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", ["byte", "char", "gpt2"])
def test_tokens_of_pieces_are_those_of_the_whole_text(size, name, gpt2, tmp_path, monkeypatch):
    tokenizer = {"byte": ByteTokenizer(), "char": CharTokenizer(), "gpt2": gpt2}[name]
    monkeypatch.setattr(our_text, "PIECE", size)
    monkeypatch.setattr(our_text, "BATCH", 3)
    monkeypatch.setattr(our_tokenizer, "PIECE_CHARS", 50)
    content = "".join(random.Random(size).choices([*sorted({*TRICKY} - {*"\0\r"}), TEXT], k=300))
    (tmp_path / "text").write_text(content, encoding="utf-8")
    data = load(TextFiles(str(tmp_path / "text")), tmp_path / "cache", tokenizer)
    raw = content.encode()
    cut = len(raw[: len(raw) - round(0.1 * len(raw))].decode(errors="ignore"))
    head, tail = (
        tokenizer.encode(part, "data").tolist() for part in (content[:cut], content[cut:])
    )
    assert data.train[:].tolist() == head
    assert data.val[:].tolist() == [head[-1], *tail]
    assert data.val_bytes == len(content[cut:].encode())


def test_held_out_text_and_its_bytes_are_the_same_for_all_tokenizers(gpt2, tmp_path):
    books = PlainText(["≈ π, naïve. " * 9, "The end.\n" * 9, "x" * 9])
    found = [load(books, tmp_path, one) for one in (ByteTokenizer(), CharTokenizer(), gpt2)]
    scored = [read_sides(data)[1].replace("<|endoftext|>", "\n\n") for data in found]
    assert scored[0] == scored[1] == scored[2]
    assert {data.val_bytes for data in found} == {len(scored[0].encode())}
    assert len({data.text_hash for data in found}) == 1


def test_only_the_beginning_is_scored_if_a_run_asks_for_it(gpt2, tmp_path):
    text = "A naïve π ≈ 3.14. " * 40
    whole, part = (load(text, tmp_path, gpt2, val_tokens=most) for most in (None, 9))
    assert part.val.tolist() == whole.val[:10].tolist()
    assert part.val_bytes == len(read_sides(part)[1].encode())
    assert part.facts()["val_tokens"] == 9
    enough = load(text, tmp_path, gpt2, val_tokens=10_000)
    assert enough.facts() == whole.facts()
    assert [data.val_limit for data in (whole, part, enough)] == [None, 9, None]


def test_gpt2s_end_of_text_stands_between_documents(gpt2, tmp_path):
    data = load(PlainText(["ab" * 10, "c" * 10]), tmp_path, gpt2)
    end = gpt2.separator()
    train, val = (
        np.concatenate([gpt2.encode(first, "x"), end, gpt2.encode(second, "x")])
        for first, second in (("ab" * 9, "c" * 9), ("ab", "c"))
    )
    np.testing.assert_array_equal(data.train, train)
    np.testing.assert_array_equal(data.val, [*end, *val])  # the first is context


def test_four_times_the_text_takes_no_more_memory(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(our_text, "BATCH", 1)
    peaks = {}
    for lines in (10, 4_000, 16_000):  # the first loads what is needed
        (tmp_path / f"{lines}.txt").write_text("All work and no play makes π a naïve ≈.\n" * lines)
        tracemalloc.start()
        load(TextFiles(str(tmp_path / f"{lines}.txt")), tmp_path / "cache", gpt2)
        peaks[lines] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[16_000] < 1.2 * peaks[4_000]


def test_document_numbers_rise_at_each_start_counting_from_the_first_token():
    starts = np.array([0, 3, 4, 9])
    assert number_documents(starts, 0, 0, 11).tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3]
    assert number_documents(starts, 0, 4, 9).tolist() == [0] * 5
    assert number_documents(starts, 0, 3, 5).tolist() == [0, 1]
    assert number_documents(starts, 2, 1, 3).tolist() == [0, 1]
    assert number_documents(starts[:0], 0, 5, 7).tolist() == [0, 0]


BOOKS = PlainText(["a" * 40, "b" * 5, "c" * 30, "d" * 3])


def load_masked(source: PlainText, cache: Path) -> TokenData:
    return load(source, cache, mask_documents=True, val_fraction=0.3)


def test_a_document_begins_at_its_separator_and_goes_on_to_the_next(tmp_path):
    data = load_masked(BOOKS, tmp_path)

    def split(ids: Ids, number: DocumentNumbers | None) -> list[str]:
        numbers = number(0, len(ids))
        return [data.tokenizer.decode(ids[numbers == n]) for n in range(numbers[-1] + 1)]

    # Of the running totals 40, 45, 75 and 78, three tenths are held out: 12, 14, 22 and 23.
    train = ["a" * 28, "\n\nbbb", "\n\n" + "c" * 22, "\n\ndd"]
    assert split(data.train, data.train_documents) == train
    # The first held-out id, which is context, ends a separator.
    val = ["\n" + "a" * 12, "\n\nbb", "\n\n" + "c" * 8, "\n\nd"]
    assert split(data.val, data.val_documents) == val


def test_documents_are_named_only_if_asked_for_and_if_there_are_two(tmp_path):
    data = load(BOOKS, tmp_path)
    assert len(data.training_batch(0, 0, 2, 8)) == 2
    assert {len(batch) for batch in data.validation(2, 8)} == {2}
    rows, apart = data.opening(8, 8)
    assert (rows.tolist(), apart) == ([data.val[:8].tolist()], None)
    held_out = load_masked(PlainText(["a" * 40], ["b" * 9, "c" * 9]), tmp_path)
    assert not held_out.training_batch(0, 0, 4, 8)[2].any()
    assert max(int(own.max()) for _, _, own in held_out.validation(4, 8)) > 0
    with refuses("data.mask_documents: documents"):
        load_masked(PlainText(["a" * 400]), tmp_path)
