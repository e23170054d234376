"""Checkpoints that do not fit their model, or are bombs: refused before they take memory."""

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_files import in_zip
from support import lone_checkpoint, train

from gptattn.errors import CheckpointError
from gptattn.runs.archive import check_pickle
from gptattn.runs.checkpoint import read_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def pickled(content: bytes) -> bytes:
    return b"\x80\x02" + content + b"."


def test_a_pickle_that_asks_for_memory_or_for_years_of_hashing_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for '__builtin__ bytearray'"):
        check_pickle(pickle.dumps(bytearray(8), 2))
    pairs = b"".join(b"q%cq%c" % (i, i) + b"h%ch%c\x86" % (i, i) for i in range(60))
    bomb = pickled(b"})" + pairs + b"K\x01s")
    with pytest.raises(ValueError, match="more than 8 deep"):
        check_pickle(bomb)


@pytest.mark.parametrize("content", [b"}0", b"h\x05", b"s", b"u", b"t", b"(", b"\x86", b"", b"q\0"])
def test_a_damaged_pickle_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_pickle(pickled(content) if content else b"")


def test_a_compressed_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    in_zip(path, {"a/data.pkl": b"\0" * 30_000_000}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match="compressed"):
        read_checkpoint(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_is_not_waited_for(run: Path, make: Callable[[Path], object]) -> None:
    file = lone_checkpoint(run)
    file.unlink()
    make(file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint(file)
