"""Files that are replaced whole, what a refusing disk says, and locks."""

import errno
from typing import IO

import pytest
from support import refuses

from gptattn.machine.disk import check_room, explain_disk_errors, free_bytes, write_atomically
from gptattn.machine.lock import hold_lock


@pytest.mark.usefixtures("small_files_only")
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "new" / "a.txt"
    write_atomically(file, lambda target: target.write(b"old"))
    with refuses(f"{file}: bytes", 7):
        write_atomically(file, lambda target: target.write(b"x" * 3000))

    def fail(target: IO[bytes]) -> None:
        target.write(b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_atomically(file, fail)
    assert file.read_bytes() == b"old"
    assert [*file.parent.iterdir()] == [file]
    write_atomically(file, lambda target: target.write(b"new"))
    assert file.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.ENOSPC, "make room"), (errno.EROFS, "another folder")],
)
def test_a_disk_that_refuses_is_one_line(code, said, tmp_path):
    with refuses(f"*: {said}", 7), explain_disk_errors(tmp_path / "a"):
        raise OSError(code, "refused")


def test_room_is_checked_on_the_disk_of_a_folder_that_is_still_to_be_made(tmp_path):
    place = tmp_path / "a" / "b"
    check_room(place, 1)
    with refuses("*: bytes", 7):
        check_room(place, free_bytes(place) * 2)


def test_a_lock_has_one_holder_and_ends_with_its_block(tmp_path):
    file = tmp_path / ".lock"
    with hold_lock(file, "field", "busy"), refuses("field: busy", 6):
        hold_lock(file, "field", "busy").__enter__()
    with hold_lock(file, "field", "free"):
        pass
