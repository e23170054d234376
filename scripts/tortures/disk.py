"""A disk that is full at some moment, or may not be written: a tmpfs, which only root may mount."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tortures.bench import Bench, Process, Result

SIZE = "16m"
CHECKPOINT = 500_000  # bytes, and some more


def can_mount(folder: Path) -> bool:
    """Whether a tmpfs can be mounted, which takes root and the right to."""
    try:
        with _tmpfs(folder / "tried"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextmanager
def _tmpfs(place: Path) -> Iterator[None]:
    place.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(place))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def full(bench: Bench, count: int, result: Result) -> None:
    """The disk fills up at a random moment of a run, or before it; each fifth time it is read-only
    when a killed run is resumed.
    """
    for i in range(count):
        bench.draw("disk", i)
        result.tried += 1
        home = f"disk_{i}"
        with _tmpfs(bench.folder / home):
            _one(bench, i, home, result)


def _one(bench: Bench, i: int, home: str, result: Result) -> None:
    name = f"{home}/run_{i}"
    place = bench.folder / home
    if i % 5 == 4:
        process = bench.begin(name, bench.variant_of(name))
        bench.after_rows(name, process)
        process.send(signal.SIGKILL)
        process.wait()
        before = _content(place)
        _run("mount", "-o", "remount,ro", str(place))
        process = bench.resume(name)
        _expect(process, "read-only", "Read-only file system", result)
        _run("mount", "-o", "remount,rw", str(place))
        result.check(_content(place) == before, "something has changed on a read-only disk")
    elif i % 5 == 3:
        _fill(place, bench.random.randrange(CHECKPOINT))
        process = bench.begin(name, bench.variant_of(name))
        _expect(process, "full before", "bytes are needed and", result)
        result.check(not (bench.folder / name).exists(), "a folder was made on a full disk")
        (place / "filler").unlink()
    else:
        process = bench.begin(name, bench.variant_of(name))
        bench.after_rows(name, process)
        # For some rows more, or for not even one.
        _fill(place, bench.random.choice((0, 4096, CHECKPOINT // 4)))
        _expect(
            process,
            "full amid",
            "No space left on device; at least [0-9,]+ bytes are needed",
            result,
        )
        bench.check_whole(name, result)
        (place / "filler").unlink()
    bench.finish(name, result)


def _expect(process: Process, way: str, said: str, result: Result) -> None:
    code, line = process.wait(), process.complaint()
    kept = code == 7 and re.search(said, line) is not None and "/" in line
    result.count(f"exit 7: {way}", int(kept))
    result.check(kept, f"{way}: ended with {code}: {line!r}")
    result.check("Traceback" not in process.text(), f"{way}: a traceback")


def _fill(place: Path, left: int) -> None:
    there = os.statvfs(place)
    # The run may be writing as well, so that less fits.
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
        file.write(bytes(max(0, there.f_bavail * there.f_frsize - left)))


def _content(place: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
