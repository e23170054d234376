"""A folder that one process at a time may write to.

The `filelock` library calls the same flock, but knows no owner, takes a pipe for a file, and on a
disk without flock turns to files that a killed process leaves behind.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gptattn.errors import RunFolderError
from gptattn.machine.untrusted import open_to_append

RUN_LOCK = ".lock"


@contextlib.contextmanager
def locked(file: Path, field: str, busy: str) -> Iterator[None]:
    """Hold `file` against other processes, however this one ends; it tells this one's number.

    Raises RunFolderError, naming `field`, where another has it: `busy` says what is wrong and what
    would be right, `OWNER` in it standing for that process.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = open_to_append(file)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner(lock)
        lock.close()
        raise RunFolderError(field, busy.replace("OWNER", owner)) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n".encode())
    try:
        yield
    finally:
        # The file stays, empty: were it removed, a process that had just opened it would hold a
        # lock that nobody else can see.
        lock.truncate(0)
        lock.close()


def locked_run(folder: Path, field: str) -> contextlib.AbstractContextManager[None]:
    """Hold a run's folder. Raises RunFolderError, naming the process that has it."""
    busy = f"OWNER is writing to {folder}; wait for it, or stop it"
    return locked(folder / RUN_LOCK, field, busy)


def _owner(lock: BinaryIO) -> str:
    lock.seek(0)
    number = lock.read(20).decode("ascii", errors="replace").strip()
    # Between the lock and the number in it there is a moment.
    return f"process {number}" if number else "another process"
