"""A text too large for disk or memory is reported as such, before anything is encoded."""

from pathlib import Path
from typing import NoReturn

import pytest
from support import TEXT, check_job, command, tiny

import gptattn.training.preflight
from gptattn.errors import DataError, DiskError
from gptattn.machine.ending import as_user_error

SIZE = len(TEXT.encode())


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes on the cache's disk, to be changed: one less than the tokens take at least."""
    there = [SIZE // 2 - 1]
    monkeypatch.setattr(gptattn.training.preflight, "free_bytes", lambda path: there[0])
    return there


def test_a_text_whose_tokens_fit_on_no_disk_is_refused_before_it_is_read(
    tmp_path: Path, free: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path)) == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: cache_dir: the tokens of ")
    assert "another cache_dir" in line
    assert "data.path" in line
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "outputs").exists()
    free[0] += 1
    check_job(tiny(tmp_path))


def test_of_a_folder_the_files_that_match_count(tmp_path: Path, free: list[int]) -> None:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    (folder / "below" / "b.md").write_text(TEXT)
    settings = tiny(tmp_path, "data=text", f"data.path={folder}")
    free[0] = SIZE - 1
    with pytest.raises(DiskError, match=r"^cache_dir: "):
        check_job(settings)
    check_job([*settings, "data.pattern='**/*.txt'"])


def test_tokens_that_are_there_already_need_no_room(tmp_path: Path, free: list[int]) -> None:
    room, free[0] = free[0], 10**9
    check_job(tiny(tmp_path))
    free[0] = room
    check_job(tiny(tmp_path))


def test_too_little_memory_for_a_text_is_no_matter_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*given: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(gptattn.training.preflight, "build_data", too_large)
    with pytest.raises(DataError) as error:
        check_job(tiny(tmp_path))
    known = as_user_error(error.value)
    assert known is not None
    assert (known.field, known.exit_code) == ("data", 3)
    assert "data.path" in known.message
    assert "tokenizer=byte" in known.message
    assert "model" not in known.message
