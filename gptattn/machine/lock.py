"""A lock that lets one process at a time write to a folder.

The `filelock` library uses the same flock, but does not record the owner, accepts a pipe as its
file, and on a disk without flock falls back to files that a killed process leaves behind.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gptattn.errors import RunFolderError
from gptattn.machine.untrusted import open_to_append

RUN_LOCK = ".lock"
GROUP = "group "  # how the file begins while processes hold the lock together
MOMENT = 5.0  # seconds in which a process that has just come or gone is through with the lock


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


@contextlib.contextmanager
def joined(file: Path, field: str, busy: str) -> Iterator[str]:
    """Hold the lock on `file` together with all that join, and give the word that they share.

    The first one writes it. Whoever joins after all have left gets a new one. Raises RunFolderError
    like `locked`, which one of these keeps out, and if the disk has no such locks.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open_to_append(file) as lock:
        try:
            _join(lock, time.monotonic() + MOMENT)
        except BlockingIOError:
            raise RunFolderError(field, busy.replace("OWNER", _owner(lock))) from None
        except OSError as error:
            no_locks = f"{file.parent} cannot be locked: {error.strerror}; give a folder on a disk"
            raise RunFolderError(field, f"{no_locks} with flock") from None
        try:
            yield _word(lock).removeprefix(GROUP)
        finally:
            with contextlib.suppress(OSError):  # others are still there
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.truncate(0)


def _join(lock: BinaryIO, until: float) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"{GROUP}{secrets.token_hex(4)}\n".encode())
        try:
            # Not atomic after the lock above: another one may come first, and write its own word.
            return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if _word(lock).isdecimal() or time.monotonic() > until:
                raise
        time.sleep(0.05)


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock on `file`; false for what is no file or cannot be read."""
    try:
        # An exclusive lock needs a file open for writing on NFS; others may have no right to that.
        access = os.O_RDWR if os.access(file, os.W_OK) else os.O_RDONLY
        descriptor = os.open(file, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as lock:
            # An owner writes its number. Without one nothing is tried, as for the moment of a try
            # nobody else could take the lock.
            if not lock.read(20).strip():
                return False
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    word = _word(lock)
    if word.startswith(GROUP):
        return "a group of processes"
    # The owner writes its number a moment after it takes the lock.
    return f"process {word}" if word else "another process"


def _word(lock: BinaryIO) -> str:
    lock.seek(0)
    return lock.read(20).decode("ascii", errors="replace").strip()
