"""A lock that lets one process at a time write to a folder.

The `filelock` library uses the same flock, but does not record the owner, accepts a pipe as its
file, and on a disk without flock falls back to files that a killed process leaves behind.
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
    """Hold a lock on `file`, which ends with this process at the latest.

    `file` then contains the process id. Raises RunFolderError, naming `field`, if another process
    holds the lock. `busy` is the message; in it, `OWNER` is replaced by that process.
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
        # The file stays, empty: if it were removed, a process that had just opened it would hold a
        # lock that nobody else can see.
        lock.truncate(0)
        lock.close()


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock on `file`; false for what is no file or cannot be read."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as lock:
            # An owner writes its number. Without one nothing is tried, as for the moment of a try
            # nobody else could take the lock.
            if not lock.read(20).strip():
                return False
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def locked_run(folder: Path, field: str) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of a run folder. Raises RunFolderError, naming the process that holds it."""
    busy = f"OWNER is writing to {folder}; wait for it, or stop it"
    return locked(folder / RUN_LOCK, field, busy)


def _owner(lock: BinaryIO) -> str:
    lock.seek(0)
    number = lock.read(20).decode("ascii", errors="replace").strip()
    # The owner writes its number a moment after it takes the lock.
    return f"process {number}" if number else "another process"
