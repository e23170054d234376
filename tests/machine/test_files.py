"""Files that are replaced whole, locks, and hashes of source code."""

import errno
from pathlib import Path

import pytest

from gptattn.errors import DiskError, RunFolderError
from gptattn.machine import source_code
from gptattn.machine.disk import check_room, free_bytes, replacing, write_atomically, writing
from gptattn.machine.lock import is_locked, locked


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.txt"
    write_atomically(file, lambda target: target.write(b"old"))

    def fail(target: object) -> None:
        target.write(b"half")  # type: ignore[attr-defined]
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_atomically(file, fail)
    assert file.read_bytes() == b"old"
    assert [path.name for path in file.parent.iterdir()] == ["a.txt"]


def test_a_file_may_be_named_after_its_content(tmp_path: Path) -> None:
    with replacing(tmp_path / "unnamed") as part:
        part.write(b"abc")
        part.path = tmp_path / "abc"
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "at least 7 bytes are needed and"),
        (errno.EROFS, "give another folder"),
        (errno.EFBIG, "raise the limit"),
        (errno.ENOENT, "was removed or moved"),
    ],
)
def test_a_disk_that_refuses_is_one_line(code: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=said) as error, writing(tmp_path / "a", lambda: 7):
        raise OSError(code, "refused")
    assert error.value.exit_code == 7


def test_room_is_checked_on_the_disk_of_a_folder_that_is_still_to_be_made(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    check_room(place, 1)
    with pytest.raises(DiskError, match="bytes are needed and"):
        check_room(place, free_bytes(place) * 2)


def test_a_lock_has_one_holder_and_ends_with_its_block(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    assert not is_locked(file)
    with locked(file, "field", "busy"):
        assert is_locked(file)
        with pytest.raises(RunFolderError, match=r"^field: busy$"), locked(file, "field", "busy"):
            pass
    assert not is_locked(file)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of a user's own: a variant, what it imports, and another variant."""
    home = tmp_path / "mine"
    home.mkdir()
    (home / "__init__.py").write_text("from mine.one import One\nfrom mine.two import Two\n")
    (home / "one.py").write_text('"""Doc."""\nfrom mine.helper import f\n\nclass One:\n    a = f\n')
    (home / "two.py").write_text("class Two:\n    pass\n")
    (home / "helper.py").write_text("def f(x):\n    return x  # as it is\n")
    monkeypatch.syspath_prepend(tmp_path)
    return home


def code(target: str) -> dict[str, str]:
    source_code._tree.cache_clear()
    source_code._hash_of.cache_clear()
    found = source_code.code_of([target], ["mine"])
    return {name: value for name, value in found.items() if name.startswith("mine")}


def test_a_variant_is_made_of_its_module_and_what_that_imports(package: Path) -> None:
    # Also by the name under which the package exports it.
    assert set(code("mine.One")) == set(code("mine.one.One")) == {"mine.one", "mine.helper"}
    assert set(code("mine.Two")) == {"mine.two"}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("def f(x):\n    return x\n", True),
        ('def f(x):\n    """What."""\n\n    return (x)\n', True),
        ("def f(x):\n    return -x\n", False),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(package: Path, text: str, same: bool) -> None:
    before = code("mine.One")
    (package / "helper.py").write_text(text)
    after = code("mine.One")
    assert (after == before) is same
    assert after["mine.one"] == before["mine.one"]
    assert source_code.is_unchanged(after)


def test_every_run_is_made_of_the_core() -> None:
    found = source_code.code_of(["gptattn.attention.GroupedQueryAttention"])
    assert set(source_code.COMMON) <= set(found)
    assert {"gptattn.attention.gqa", "gptattn.attention.core"} <= set(found)
    assert not {"gptattn.attention.mla", "gptattn.training.run"} & set(found)
