"""Plain text of files and folders, what is held out of it, and what is refused."""

import ast
import hashlib
import importlib.metadata
import inspect
import io
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
from loading import load, read_sides
from support import refuses

from gptattn.data import text as our_text
from gptattn.data.text import (
    PackageSource,
    PlainText,
    PythonDocs,
    Shakespeare,
    StandardLibrary,
    TextFiles,
    read_document,
)
from gptattn.data.tokenizer import CharTokenizer
from gptattn.errors import DataError


def write(folder: Path, files: Mapping[str, str | bytes]) -> str:
    """Write the files into the folder; return its path."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def read(source: PlainText, side: str = "train") -> list[str]:
    """Return the documents of one side, each as one string."""
    return ["".join(read_document(document)) for document in getattr(source, side)]


def test_pydocs_are_long_prose_and_a_python_without_them_says_what_to_use(monkeypatch):
    (content,) = read(PythonDocs())
    low, high = (460_000, 470_000) if sys.version_info[:2] == (3, 11) else (300_000, 2_000_000)
    assert low < len(content) < high
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with refuses("data: data=text data.path=", 3):
        PythonDocs()


def test_the_standard_library_excludes_tests_and_its_sides_are_disjoint():
    library = StandardLibrary()
    train, held_out = library.train, library.held_out
    assert Path(inspect.getfile(ast)) in [*train, *held_out]
    assert not any({"test", "site-packages"} & {*file.parts} for file in [*train, *held_out])
    assert len(train) > 10 * len(held_out) > 100
    assert not {*train} & {*held_out}


def test_a_package_is_its_sources_in_the_version_that_was_asked_for():
    version = importlib.metadata.version("networkx")
    package = PackageSource("networkx", version, held_out=0.1)
    names = [str(path) for path in (*package.train, *package.held_out)]
    assert any(name.endswith("networkx/classes/graph.py") for name in names)
    assert not any("/tests/" in name for name in names)
    assert len(package.train) > 5 * len(package.held_out) > 50
    with refuses("data.version: not 1.0", 3):
        PackageSource("networkx", "1.0")
    for name in ("nothing_like_it", "../x", "json"):
        with refuses("data.name: installed", 3):
            PackageSource(name)


def test_a_folder_is_its_files_sorted_without_hidden_and_empty_ones(tmp_path, monkeypatch):
    names = {"b.txt": "second", "a.txt": "first", "c/d.md": "third"}
    hidden = {".hidden.txt": "no", ".git/e.txt": "no", "c/.f": "no", ".notes/a.txt": "seen"}
    write(tmp_path, names | hidden | {"d.txt": ""})
    assert read(TextFiles(str(tmp_path))) == ["first", "second", "third"]
    assert read(TextFiles(str(tmp_path), pattern="**/*.md")) == ["third"]
    assert read(TextFiles(str(tmp_path / "a.txt"))) == ["first"]
    assert read(TextFiles(str(tmp_path / ".notes"))) == ["seen"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read(TextFiles("~/a.txt")) == ["first"]


def test_a_linked_folder_is_read_once_and_a_link_to_nothing_is_refused(tmp_path):
    write(tmp_path / "text", {"a.txt": "first", "c/d.txt": "third"})
    write(tmp_path / "apart", {"b.txt": "second", "deep/e.txt": "fourth"})
    (tmp_path / "text" / "b").symlink_to("../apart")
    (tmp_path / "apart" / "loop").symlink_to("../text")
    (tmp_path / "text" / "z").symlink_to("c")
    assert read(TextFiles(str(tmp_path / "text"))) == ["first", "second", "fourth", "third"]
    assert read(TextFiles(str(tmp_path / "text"), pattern="b/*.txt")) == ["second"]
    (tmp_path / "text" / "gone.txt").symlink_to("nowhere")
    with refuses("data.path: gone.txt", 3):
        TextFiles(str(tmp_path / "text"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": "DIR/empty/1.txt"}, "data.path: empty"),
        ({"path": "DIR/empty"}, "data.path: no file"),
        ({"path": "DIR/mark.txt"}, "data: too short"),
        ({"path": "DIR/zero.txt"}, "data: zero.txt is binary"),
        ({"path": "DIR/latin.txt"}, "data: latin.txt is not UTF-8"),
        ({"path": "DIR", "pattern": "/*"}, "data.path: /*"),
        ({"path": "DIR/a.txt", "val_path": "DIR"}, "data.val_path: all of"),
    ],
)
def test_what_is_no_text_is_named_with_its_setting(given, said, tmp_path):
    files = {"a.txt": "text", "empty/1.txt": "", "mark.txt": "\ufeff", "zero.txt": "text\0more"}
    folder = write(tmp_path / "d", files | {"latin.txt": "café and more".encode("latin-1")})
    settings = {key: value.replace("DIR", folder) for key, value in given.items()}
    with refuses(said, 3):
        load(TextFiles(**settings), tmp_path / "cache")


def test_byte_order_mark_and_carriage_returns_are_no_part_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(our_text, "PIECE", 5)
    plain = "First ≈𝄞é line\nsecond, \ufeff in it\n\nlast\n" * 3
    file = tmp_path / "book.txt"
    for raw in (plain, "\ufeff" + plain, "\ufeff" + plain.replace("\n", "\r\n")):
        file.write_bytes(raw.encode())
        assert max(map(len, read_document(file))) <= 5
        data = load(TextFiles(str(file)), tmp_path / "cache", CharTokenizer())
        assert "".join(read_sides(data)) == plain
        assert data.text_hash == hashlib.sha256(plain.encode()).hexdigest()


# What is held out


def test_the_tail_of_each_document_is_held_out_and_documents_are_apart(tmp_path):
    data = load(PlainText(["a" * 40, "b" * 60, "c" * 20]), tmp_path)
    assert read_sides(data) == (
        "a" * 36 + "\n\n" + "b" * 54 + "\n\n" + "c" * 18,
        "aaaa\n\nbbbbbb\n\ncc",
    )
    # The first scored token comes after a separator as well.
    assert data.val[:1].tolist() == [ord("\n")]
    assert data.val_bytes == 4 + 6 + 2 + 2 * 2


def test_documents_too_short_for_a_tail_give_their_share_together(tmp_path):
    for fraction, characters in ((0.1, 30), (0.001, 1)):
        for text in ("xyz", "é≈x"):  # the share is of the bytes, and characters stay whole
            data = load(PlainText([text] * 100), tmp_path, val_fraction=fraction)
            train, val = (side.replace("\n", "") for side in read_sides(data))
            size = len(text.encode()) * 100
            assert len(train.encode()) + len(val.encode()) == size
            assert 0 <= len(val.encode()) - max(1, round(size * fraction)) <= 2
            assert text != "xyz" or len(val) == characters


def test_val_path_is_held_out_whole_and_nothing_else_is(tmp_path):
    books = write(tmp_path / "books", {"1": "a" * 40, "2": "b" * 60, "val/3": "c" * 9})
    (tmp_path / "link").symlink_to(tmp_path / "books" / "val")
    data = load(TextFiles(books, val_path=str(tmp_path / "link")), tmp_path / "cache")
    assert read_sides(data) == ("a" * 40 + "\n\n" + "b" * 60, "c" * 9)
    assert data.val_bytes == 9


def test_the_hash_is_of_the_content_and_of_what_is_held_out(tmp_path):
    a, b = "a" * 40, "b" * 60
    given = [([a, b],), ([a + "\n\n" + b],), ([a[1:], "a" + b],), ([a], [b]), ([b], [a])]
    hashes = [load(PlainText(*texts), tmp_path / "cache").text_hash for texts in given]
    assert len(set(hashes)) == len(given)
    books = write(tmp_path / "books", {"1": a, "2": b})
    assert load(TextFiles(books), tmp_path / "cache").text_hash == hashes[0]


# Tiny Shakespeare


def test_a_download_that_fails_or_is_another_page_leaves_nothing(tmp_path, monkeypatch):
    answers = [urllib.error.URLError("no route"), io.BytesIO(b"log in first")]
    monkeypatch.setattr(urllib.request, "urlopen", mock.Mock(side_effect=answers))
    for said in (r"cannot fetch https.*no route.*; get the file", "sha256"):
        with pytest.raises(DataError, match=said):
            Shakespeare(None, cache_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())
