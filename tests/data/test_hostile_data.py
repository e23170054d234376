"""Damaged or hostile texts, tokenizers and token files: exit 3 naming the file, or a new file."""

import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bpe

from gptattn.data import bpe_files
from gptattn.data.text import text
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.data.tokens import load_tokens
from gptattn.decode.prompt import read_prompt
from gptattn.errors import DataError

CONTENT = "All work and no play.\n" * 9

# Bytes that are no UTF-8 text, and the offset of the first wrong one.
NO_TEXT: dict[str, tuple[bytes, int]] = {
    "NUL": (b"\0", 0),
    "NUL behind text": (b"text\0", 4),
    "UTF-16": ("text".encode("utf-16"), 3),
    "UTF-16, big end": (b"\0t\0e", 0),
    "UTF-32": ("t".encode("utf-32"), 2),
    "Latin-1": (b"caf\xe9 au lait", 3),
    "a byte alone": (b"\x80", 0),
    "cut in a character": (b"ab\xe2\x89", 2),
    "too long a form": (b"\xc0\xaf", 0),
    "too long a form of 3": (b"a\xe0\x80\xaf", 1),
    "too long a form of 4": (b"\xf0\x80\x80\xaf", 0),
    "half a pair": (b"ab\xed\xa0\x80", 2),
    "above U+10FFFF": (b"\xf4\x90\x80\x80", 0),
    "five bytes": (b"\xf8\x88\x80\x80\x80", 0),
    "0xff": (b"x" * 70_000 + b"\xff", 70_000),
    "a pickle": (b"\x80\x04K\x01.", 0),
    "gzip": (b"\x1f\x8b\x08\x00", 3),
    "a zip": (b"PK\x03\x04\x14\x00\x00", 5),
    "an array": (b"\x93NUMPY\x01\x00", 7),
    "a picture": (b"\x89PNG\r\n\x1a\n", 0),
    "100 MB of one line": (b"x" * 100_000_000 + b"\0", 100_000_000),
}


def read_all(path: str | Path) -> None:
    for document in text(str(path)).documents:
        deque(document(), maxlen=0)


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_file_that_is_no_text_is_named_with_the_offset(name: str, tmp_path: Path) -> None:
    raw, offset = NO_TEXT[name]
    file = tmp_path / "theirs.txt"
    file.write_bytes(raw)
    with pytest.raises(DataError) as error:
        read_all(file)
    assert error.value.exit_code == 3
    assert str(file) in error.value.message
    assert f"byte {offset})" in error.value.message or f"offset {offset})" in error.value.message


def loop(path: Path) -> None:
    path.symlink_to(path)


def two_loops(path: Path) -> None:
    path.symlink_to(path.with_name("b"))
    path.with_name("b").symlink_to(path)


# Makes at a path something other than a file with content.
NO_FILE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "empty": Path.touch,
    "pipe": os.mkfifo,
    "device without end": lambda path: path.symlink_to("/dev/zero"),
    "device without content": lambda path: path.symlink_to(os.devnull),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "link to nothing": lambda path: path.symlink_to(path.with_name("gone")),
    "link to itself": loop,
    "links in a circle": two_loops,
    "empty folder": Path.mkdir,
    "folder of a pipe": lambda path: (path.mkdir(), os.mkfifo(path / "a.txt")),
    "folder of a loop": lambda path: (path.mkdir(), loop(path / "a.txt")),
    "folder of itself": lambda path: (path.mkdir(), (path / "a").symlink_to(path)),
}


@pytest.mark.parametrize("name", NO_FILE)
def test_what_is_no_file_is_named_and_not_waited_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    NO_FILE[name](path)
    with pytest.raises(DataError) as error:
        read_all(path)
    assert str(path) in error.value.message


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 3000, "/proc/self/mem", "~nobody-here/a"])
def test_a_path_that_no_file_can_have_is_refused(path: str) -> None:
    with pytest.raises(DataError):
        read_all(path)


def test_a_prompt_without_end_is_refused() -> None:
    with pytest.raises(DataError, match=r"prompt_file: has more than 16,000,000 bytes"):
        read_prompt(None, Path("/dev/zero"))


# Tokenizer files


def with_model(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda node: node | {"model": node["model"] | values}


def vocab(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], Any]:
    def edit(node: dict[str, Any]) -> dict[str, Any]:
        change(node["model"]["vocab"])
        return node

    return edit


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda node: [node],
    "a number": lambda node: 1,
    "null": lambda node: None,
    "no model": lambda node: node | {"model": None},
    "another model": with_model(type="WordPiece"),
    "dropout": with_model(dropout=0.5),
    "vocabulary a list": with_model(vocab=["a"]),
    "no vocabulary": with_model(vocab={}),
    "merges a word": with_model(merges="a b"),
    "merge of one": with_model(merges=["ab"]),
    "merge of three": with_model(merges=[["a", "b", "c"]]),
    "merge of numbers": with_model(merges=[[1, 2]]),
    "merge of unknown tokens": with_model(merges=[["qq", "zz"]]),
    "a normalizer": lambda node: node | {"normalizer": {"type": "Lowercase"}},
    "another split": lambda node: node | {"pre_tokenizer": {"type": "Whitespace"}},
    "added tokens a word": lambda node: node | {"added_tokens": "x"},
    "added token a word": lambda node: node | {"added_tokens": ["x"]},
    "added token past the end": lambda node: (
        node | {"added_tokens": [{"id": 70_000, "content": "x"}]}
    ),
    "half a pair": vocab(lambda v: v.update({"\ud800": len(v)})),
    "id negative": vocab(lambda v: v.update({"a": -1})),
    "id past the end": vocab(lambda v: v.update({"a": 65_536})),
    "id twice": vocab(lambda v: v.update({"a": v["b"]})),
    "id a word": vocab(lambda v: v.update({"a": "7"})),
    "id half": vocab(lambda v: v.update({"a": 0.5})),
    "id true": vocab(lambda v: v.update({"a": True})),
    "a byte missing": vocab(lambda v: v.pop("a")),
    "too many tokens": vocab(lambda v: v.update({f"x{i}": 400 + i for i in range(66_000)})),
}
RAW: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"model": {',
    "NUL": b'{"a": "\0"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "a large number": b'{"model": ' + b"9" * 5_000 + b"}",
    "100 MB of one line": b'"' + b"x" * 100_000_000,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = bpe(tmp_path_factory.mktemp("bpe"))
    bpe_files.read(folder)
    return json.loads((folder / "tokenizer.json").read_text())


@pytest.mark.parametrize("name", [*EDITS, *RAW])
def test_a_tokenizers_file_that_cannot_be_is_refused_by_name(
    name: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    if name in RAW:
        file.write_bytes(RAW[name])
    else:
        file.write_text(json.dumps(EDITS[name](json.loads(json.dumps(whole)))))
    with pytest.raises(DataError) as error:
        bpe_files.read(tmp_path)
    assert str(file) in error.value.message
    assert "\n" not in str(error.value)


# Token files, which are made again


def damaged(change: Callable[[np.ndarray], Any]) -> Callable[[Path], object]:
    def write(file: Path) -> None:
        change(np.fromfile(file, dtype="<u2")).tofile(file)

    return write


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "odd length": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "short": damaged(lambda ids: ids[:-1]),
    "long": damaged(lambda ids: np.append(ids, ids[:1])),
    "one bit": damaged(lambda ids: ids ^ (np.arange(len(ids)) == 7).astype("<u2")),
    "id past the vocabulary": damaged(lambda ids: np.where(np.arange(len(ids)) == 3, 256, ids)),
    "other ids": damaged(lambda ids: ids[::-1].copy()),
    "bytes swapped": damaged(lambda ids: ids.byteswap()),
    "as int32": damaged(lambda ids: ids.astype("<i4")),
    "as float": damaged(lambda ids: ids.astype("<f4")),
    "a link to a device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "another name": lambda file: file.rename(file.with_name(f"{file.name[:64]}-many.tokens")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_token_file_that_is_not_as_it_was_written_is_never_used(
    name: str, tmp_path: Path
) -> None:
    def load() -> list[int]:
        data = load_tokens(
            lambda: CONTENT, ByteTokenizer(), context_length=8, val_fraction=0.1, cache=tmp_path
        )
        return [*data.train[:].tolist(), *data.val[1:].tolist()]

    assert load() == list(CONTENT.encode())
    file = max(tmp_path.iterdir(), key=lambda file: file.stat().st_size)  # the training tokens
    other = tmp_path / "copy"  # the first load, which has it open, must not see the change
    file.rename(other)
    file.write_bytes(other.read_bytes())
    DAMAGES[name](file)
    assert load() == list(CONTENT.encode())


def test_there_are_sixty_malformed_files() -> None:
    assert sum(map(len, (NO_TEXT, NO_FILE, EDITS, RAW, DAMAGES))) >= 60
