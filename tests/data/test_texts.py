"""Texts from a file, a folder and a download, and the errors that name what is refused."""

import ast
import hashlib
import inspect
import io
import os
import sys
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gptattn.data.text import SHAKESPEARE_SHA256, cache_folder, pydocs, shakespeare, stdlib, text
from gptattn.data.text_file import TextFile
from gptattn.errors import DataError, UserError


def read(*args: Any, **kwargs: Any) -> list[str]:
    """Return the documents of a text, each as one string."""
    return ["".join(document()) for document in text(*args, **kwargs).documents]


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


def test_the_standard_library_is_its_sources_without_tests_and_no_file_is_on_both_sides() -> None:
    corpus = stdlib()
    trained = {"".join(document()) for document in corpus.documents}
    held_out = {"".join(document()) for document in corpus.held_out}
    assert inspect.getsource(ast) in trained | held_out
    assert inspect.getsource(pytest) not in trained | held_out
    assert len(corpus.documents) > 10 * len(corpus.held_out) > 100
    names = [[str(d) for d in side] for side in (corpus.documents, corpus.held_out)]
    assert all(side == sorted(side) for side in names)
    assert not set(names[0]) & set(names[1])


def test_files_stay_on_their_side_when_others_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=r"no source files in .*; use data=text data\.path="):
        stdlib()

    def held_out(names: range) -> set[str]:
        for i in names:
            (tmp_path / f"{i}.py").write_text(f"x = {i}")
        return {
            document.path.name for document in stdlib().held_out if isinstance(document, TextFile)
        }

    few = held_out(range(200))
    assert few
    assert few == {n for n in held_out(range(200, 300)) if int(n[:-3]) < 200}
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "new.py").write_text("no")
    assert len(stdlib().documents) + len(stdlib().held_out) == 300


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
