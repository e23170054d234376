"""`data=bin` reads ids as other projects write them, and what gptattn-prepare wrote."""

import gzip
import json
import os
from functools import partial

import numpy as np
import pytest
import torch
from loading import load, request
from numpy.typing import NDArray
from safetensors.torch import save
from support import TEXT, check_job, refuses, tiny

from gptattn.data import bin_files
from gptattn.data.bin_files import BinFiles
from gptattn.data.bpe import ByteLevelBPE
from gptattn.data.text import PlainText
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, TaskIds
from gptattn.data.tokens import INDEX, make_tokens

IDS = np.random.default_rng(0).integers(0, 256, 1_000).astype("<u2")


def shard(ids: NDArray[np.uint16]) -> bytes:
    """A shard as modded-nanogpt's data/fineweb.py writes it, by its own description."""
    numbers = np.zeros(256, dtype=np.int32)
    numbers[:3] = 20240520, 1, len(ids)
    return numbers.tobytes() + ids.tobytes()


@pytest.mark.parametrize("form", ["val", "trainval", "modded", "one file", "train_rest"])
def test_each_form_gives_its_ids(form, tmp_path, monkeypatch):
    monkeypatch.setattr(bin_files, "PIECE_TOKENS", 128)
    folder, to, cache = (tmp_path / name for name in ("ids", "to", "cache"))
    folder.mkdir()
    given, val = {"path": str(folder)}, IDS[900:]
    if form == "modded":
        (folder / "fineweb_train_000001.bin").write_bytes(shard(IDS[:300]))
        IDS[300:301].tofile(folder / "fineweb_train_000002.bin")  # without a header
        (folder / "fineweb_train_000003.bin").write_bytes(shard(IDS[301:900]))
        (folder / "fineweb_val_000000.bin").write_bytes(shard(val))
    elif form == "one file":
        IDS.tofile(folder / "x.bin")
        given = {"path": str(folder / "x.bin")}
        val = IDS[899:]  # the tail of one file has the last training id as context
    else:
        IDS[:900].tofile(folder / "train.bin")
        val.tofile(folder / f"{form}.bin")
        if form == "train_rest":
            given["val_path"] = str(folder / f"{form}.bin")
    data = load(BinFiles(**given), cache)
    np.testing.assert_array_equal(data.train[:], IDS[:900])
    np.testing.assert_array_equal(data.val[:], val)
    assert data.val_bytes == len(val) - 1
    make_tokens(BinFiles(**given), to, request(tmp_path))
    prepared = load(BinFiles(str(to)), cache)
    assert (prepared.facts(), prepared.text_hash) == (data.facts(), data.text_hash)
    first = min(folder.iterdir())
    raw = bytearray(first.read_bytes())
    raw[-10] ^= 1
    first.write_bytes(raw)
    os.utime(first, (1, 1))  # the clock of a disk may tick slowly
    assert load(BinFiles(**given), cache).text_hash != data.text_hash


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\0bc", "x.bin, as 16-bit ids,"),
        (shard(IDS)[:-2], "x.bin"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '<u2'", "a NumPy file"),
        (save({"ids": torch.arange(9)}), "safetensors"),
        (gzip.compress(IDS.tobytes()), "gzip"),
        ("naïve 日本 text\n".encode() * 99, "data=text"),
        (b'[{"ids": [1, 2]}]\n' * 9, "data=text"),
    ],
    ids=["odd", "cut", "npy", "safetensors", "gzip", "text", "json"],
)
def test_what_is_no_file_of_ids_is_named(content, said, tmp_path):
    (tmp_path / "x.bin").write_bytes(content)
    with refuses(f"data.path: {said}", 3):
        load(BinFiles(str(tmp_path / "x.bin")), tmp_path / "c")


def test_ids_and_tokenizer_must_fit(tmp_path):
    (IDS + 50_000).tofile(tmp_path / "x.bin")
    source, cache = BinFiles(str(tmp_path / "x.bin")), tmp_path / "c"
    for without in (ByteTokenizer(), TaskIds(), CharTokenizer()):
        with refuses("tokenizer: tokenizer.vocab_size=50256"):
            load(source, cache, without)
    assert load(source, cache, TaskIds(50_257)).val_bytes is None
    with refuses("model.context_length: 900"):
        load(source, cache, TaskIds(50_257), context_length=900)


def test_an_end_of_text_begins_a_document_and_counts_as_any_separator(gpt2_files, tmp_path):
    tokenizer = ByteLevelBPE(str(gpt2_files))
    end = tokenizer.separator()
    ids = np.concatenate([end, tokenizer.encode("One.", "x"), end, tokenizer.encode("Two", "x")])
    for name, times in (("val", 1), ("train", 9)):
        np.tile(ids, times).astype("<u2").tofile(tmp_path / f"{name}.bin")
    data = load(BinFiles(str(tmp_path)), tmp_path / "cache", tokenizer, mask_documents=True)
    assert data.val_bytes == len("One.") + 2 + len("Two")
    found, _, numbers = data.training_batch(1, 1, 4, 40)
    later = (found[:, 1:] == int(end[0])).cumsum(1)
    assert torch.equal(numbers, torch.cat([torch.zeros(4, 1, dtype=torch.int64), later], 1))


# What was prepared


@pytest.mark.parametrize(
    ("make", "name", "masked"),
    [(CharTokenizer, "char", False), (partial(ByteLevelBPE, vocab_size=300), "bpe", True)],
)
def test_a_prepared_text_is_the_text(make, name, masked, tmp_path):
    source, to = PlainText([TEXT, TEXT[:999], "naïve " * 20]), tmp_path / "to"
    make_tokens(source, to, request(tmp_path / "a", make(), tokenizer_name=name))
    found = load(BinFiles(str(to)), tmp_path / "b", make(), mask_documents=masked)
    expected = load(source, tmp_path / "c", make(), mask_documents=masked)
    for ours, theirs in zip(
        (*found.training_batch(1, 2, 6, 40), *next(iter(found.validation(9, 40)))),
        (*expected.training_batch(1, 2, 6, 40), *next(iter(expected.validation(9, 40)))),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert found.facts() == expected.facts()
    assert found.text_hash == expected.text_hash
    if name == "bpe":  # its files lie beside the ids
        load(BinFiles(str(to)), tmp_path / "b", ByteLevelBPE(str(to)))
    advice = "char" if name == "char" else f"gpt2 tokenizer.path={to}"
    with refuses(f"tokenizer: ={advice}"):
        load(BinFiles(str(to)), tmp_path / "b", ByteTokenizer())
    with refuses("data.val_path: leave", 3):
        load(BinFiles(str(to), val_path=str(to)), tmp_path / "b")


def test_the_command_prepares_what_a_run_trains_on(tmp_path, call):
    text, to = tmp_path / "book.txt", tmp_path / "to"
    text.write_text(TEXT)
    cache = f"cache_dir={tmp_path / 'cache'}"
    given = (cache, "data=text", f"data.path={text}", "tokenizer=char", f"to={to}")
    code, out, err = call("prepare", *given)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith(f"train.py data=bin data.path={to} tokenizer=char")
    assert out.startswith("train: 1,686 tokens\nval: 186 tokens\n")
    assert json.loads((to / INDEX).read_text())["choice"] == "char"
    check_job(tiny(tmp_path / "run", "data=bin", f"data.path={to}", "tokenizer=char"))
    code, _, err = call("prepare", f"to={tmp_path / 'x'}", "data=recall")
    assert (code, err.partition("=")[0]) == (2, "error: data: data")
