"""A prepared text has the ids of the whole text, in shards that outlive a stop."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support import TEXT, TRICKY, bpe

from gptattn.data import prepare as preparing
from gptattn.data.bpe import GPT2Tokenizer
from gptattn.data.corpus import Corpus
from gptattn.data.hf_rows import rows
from gptattn.data.prepare import PartedText, fit, in_parts, prepare
from gptattn.data.prepared import Index, documents_file, read_index
from gptattn.data.shards import ShardedTokens
from gptattn.data.stored import bin_files
from gptattn.data.text import text
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from gptattn.errors import ConfigError, DataError, OutOfMemory

LONG = (TEXT + TRICKY.replace("\0", "") + "\r\nthe end\n") * 3


@pytest.fixture(params=["byte", "char", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "gpt2":
        return GPT2Tokenizer(str(bpe(tmp_path / "bpe")))
    return ByteTokenizer() if request.param == "byte" else CharTokenizer()


@pytest.fixture(params=[700, 2**26])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that every document is cut, and the usual ones."""
    monkeypatch.setattr(preparing, "PART_BYTES", request.param)


def parted(corpus: Corpus, fraction: float = 0.1) -> PartedText:
    found = in_parts(corpus, fraction, "the text")
    assert found is not None
    return found


def prepared(source: PartedText, tokenizer: Tokenizer, folder: Path, workers: int = 1) -> Index:
    fit(tokenizer, source, folder.parent / "cache")
    return prepare(source, tokenizer, folder, choice="byte", workers=workers)


def ids_of(index: Index, folder: Path, side: str) -> NDArray[np.uint16]:
    return ShardedTokens(index.shards_of(folder, side))[:]


@pytest.mark.usefixtures("parts")
def test_the_ids_of_files_are_those_of_each_document_behind_a_separator(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder, held_out = tmp_path / "texts", tmp_path / "held.txt"
    folder.mkdir()
    for name, content in (("a.txt", LONG), ("b.txt", "Short."), ("c.txt", LONG[::-1])):
        (folder / name).write_bytes(content.encode())
    held_out.write_bytes(LONG.encode())
    corpus = text(str(folder), val_path=str(held_out))
    index = prepared(parted(corpus), tokenizer, tmp_path / "to")
    wanted = {"train": corpus.documents, "val": corpus.held_out}
    for side, documents in wanted.items():
        expected, starts = [], []
        for document in documents:
            starts.append(sum(map(len, expected)))
            whole = "".join(document())
            expected += [tokenizer.separator()[1], tokenizer.encode(whole, "data")]
        found = ids_of(index, tmp_path / "to", side)
        np.testing.assert_array_equal(found, np.concatenate(expected))
        before, places = 0, []
        for shard in index.shards_of(tmp_path / "to", side):
            places += [*(before + np.fromfile(documents_file(shard.path), "<i8"))]
            before += shard.count
        assert places == starts


@pytest.mark.usefixtures("parts")
def test_without_held_out_files_the_end_of_each_file_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    index = prepared(parted(text(str(file)), 0.25), ByteTokenizer(), tmp_path / "to")
    train, val = (ids_of(index, tmp_path / "to", side) for side in ("train", "val"))
    raw = bytes(train.astype(np.uint8)).removeprefix(b"\n\n")
    tail = bytes(val.astype(np.uint8)).removeprefix(b"\n\n")
    assert raw + tail == TEXT.encode()
    assert 0.2 < len(tail) / len(TEXT.encode()) <= 0.25


@pytest.mark.parametrize(
    "line", ["这是一个测试。\n", "слово за слово\r\n", "a\u3000 b\u00a0\nπ \r"]
)
def test_a_text_of_any_script_is_cut_where_no_word_is(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "PART_BYTES", 50)
    file, tokenizer = tmp_path / "book.txt", GPT2Tokenizer(str(bpe(tmp_path / "bpe")))
    file.write_bytes(line.encode() * 40)
    source = parted(text(str(file)))
    assert len(source.parts) > 5
    index = prepared(source, tokenizer, tmp_path / "to")
    found = [ids_of(index, tmp_path / "to", side)[1:] for side in ("train", "val")]
    whole = "".join(text(str(file)).documents[0]())
    np.testing.assert_array_equal(np.concatenate(found), tokenizer.encode(whole, "data"))


@pytest.mark.parametrize("apart", [False, True])
def test_empty_rows_are_no_documents(apart: bool, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        lines = [json.dumps({"text": "" if i % 3 else f"{name} {i}"}) for i in range(60)]
        (tmp_path / name).write_text("\n".join(lines))
    val_path = str(tmp_path / "b.jsonl") if apart else None
    source = rows(None, path=str(tmp_path), val_path=val_path, val_fraction=0.3)
    index = prepared(source, ByteTokenizer(), tmp_path / "to")
    assert sum(shard.documents for shard in index.shards) == 40


def test_a_text_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text(LONG)

    class Slow(ByteTokenizer):
        def encode_pieces(self, pieces, field):  # type: ignore[no-untyped-def]
            file.write_text(LONG + "more")
            yield from super().encode_pieces(pieces, field)

    with pytest.raises(DataError, match=r"changed while it was being encoded; remove .* and start"):
        prepared(parted(text(str(file))), Slow(), tmp_path / "to")


class Dying(ByteTokenizer):
    def encode_pieces(self, pieces, field):  # type: ignore[no-untyped-def]
        os._exit(9)


def test_a_process_that_is_killed_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "PART_BYTES", 500)
    (tmp_path / "book.txt").write_text(LONG)
    with pytest.raises(
        OutOfMemory, match=r"a process that encodes was killed, .*; the same command goes on"
    ):
        prepared(parted(text(str(tmp_path / "book.txt"))), Dying(), tmp_path / "to", workers=2)


def test_the_hash_is_that_of_the_text_whatever_the_tokenizer_or_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "PART_BYTES", 1000)
    file = tmp_path / "book.txt"
    file.write_text(LONG)
    byte = prepared(parted(text(str(file))), ByteTokenizer(), tmp_path / "byte")
    both = prepared(parted(text(str(file))), ByteTokenizer(), tmp_path / "both", workers=2)
    char = prepared(parted(text(str(file))), CharTokenizer(), tmp_path / "char")
    assert byte.shards == both.shards
    assert byte.text_sha256 == char.text_sha256
    assert byte.tokenizer != char.tokenizer
    file.write_text(LONG.replace("end", "END"))
    other = prepared(parted(text(str(file))), ByteTokenizer(), tmp_path / "other")
    assert byte.text_sha256 != other.text_sha256


def test_it_goes_on_with_the_parts_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparing, "PART_BYTES", 500)
    file, to = tmp_path / "book.txt", tmp_path / "to"
    file.write_text(LONG)
    whole = prepared(parted(text(str(file))), ByteTokenizer(), tmp_path / "whole")
    made: list[int] = []

    class Stopped(ByteTokenizer):
        def encode_pieces(self, pieces, field):  # type: ignore[no-untyped-def]
            made.append(len(made))
            if len(made) == 4:
                raise KeyboardInterrupt
            yield from super().encode_pieces(pieces, field)

    source = parted(text(str(file)))
    with pytest.raises(KeyboardInterrupt):
        prepared(source, Stopped(), to)
    assert not (to / "index.json").exists()
    before = {path: path.stat().st_mtime_ns for path in to.glob("*.bin")}
    assert len(before) == 3
    assert capfd.readouterr().err == ""
    with pytest.raises(DataError, match="is not wholly prepared"):
        bin_files(str(to))
    again = prepared(source, Stopped(), to)
    assert capfd.readouterr().err == f"encoding: 3 of {len(source.parts)} parts are there\n"
    assert [s.sha256 for s in again.shards] == [s.sha256 for s in whole.shards]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(made) == 4 + len(source.parts) - 3
    names = {path.suffix for path in to.iterdir()} | {path.name for path in to.glob("*.json")}
    assert names == {".bin", ".documents", ".json", "", "index.json"}  # "": the lock
    assert prepared(source, Stopped(), to) == read_index(to) == again
    assert len(made) == 4 + len(source.parts) - 3
    next(to.glob("train*.bin")).unlink()
    with pytest.raises(DataError, match="is missing; remove"):
        prepared(source, Stopped(), to)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file, to = tmp_path / "book.txt", tmp_path / "to"
    file.write_text(LONG)
    prepared(parted(text(str(file))), ByteTokenizer(), to)
    with pytest.raises(ConfigError, match=r"^to: .*shards of another text, or of another tokenize"):
        prepared(parted(text(str(file))), CharTokenizer(), to)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"files of its own \(notes\.md\); give another folder"):
        prepared(parted(text(str(file))), ByteTokenizer(), tmp_path / "own")


def test_an_error_in_a_process_names_the_file_and_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "PART_BYTES", 1000)
    monkeypatch.setattr("gptattn.data.hf_rows.PART_BYTES", 1000)
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": TEXT}) for _ in range(4)]
    file.write_text("\n".join([*lines[:3], "{broken", lines[3]]))
    place = 3 * (len(lines[0]) + 1)
    source = rows(None, path=str(file))
    for workers in (1, 2):
        with pytest.raises(DataError, match=rf"^data: .*the line at byte {place:,}, is no JSON"):
            prepared(source, ByteTokenizer(), tmp_path / str(workers), workers)
