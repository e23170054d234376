"""Starts runs as copies of a process that has imported the large libraries already.

Importing torch and Lightning takes seconds of a processor's time, a copy milliseconds. Only
libraries are imported beforehand: each run reads this project's code, and a user's, for itself.

`python -m gptattn.sweep.fork_server FD LIBRARY ...` is the server; it imports the libraries, and
reads requests from the socket FD.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import IO

LIBRARIES = ("torch", "lightning.pytorch", "torch.utils.tensorboard", "hydra")
MODULE = (sys.executable, "-m")  # how the commands begin that the server can start
REQUEST_BYTES = 2**20


class Copy:
    """A started process, with those members of `subprocess.Popen` that a sweep uses."""

    def __init__(self, status: int) -> None:
        """`status`: the reading end of a pipe with its pid, and later its exit code, in lines.

        Raises ConnectionError if the server or the process was killed before the process started.
        """
        self._status = os.fdopen(status, "rb", buffering=0)
        pid = int(self._status.readline() or 0)
        if pid <= 0:  # the end, or the exit code of a copy that has not come to write its pid
            self._status.close()
            raise ConnectionError("the fork server has ended, or its copy")
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired after so many seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["python"], timeout or 0.0)
            with self._status:
                code = self._status.readline()
            if not code:  # the server is gone, and nobody will know how this process ends
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            self.returncode = int(code or -signal.SIGKILL)
        return self.returncode


class ForkServer:
    """Context manager that holds the server."""

    def __init__(self, libraries: Sequence[str] = LIBRARIES) -> None:
        """`libraries`: the modules that its copies need not import."""
        self._libraries = libraries

    def __enter__(self) -> "ForkServer":
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(self._requests.close)
            self.process = subprocess.Popen(
                [*MODULE, __name__, str(theirs.fileno()), *self._libraries],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only the sweep, which ends its runs
            )
            failed.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._requests.close()
        self.process.terminate()
        self.process.wait()

    def start(self, command: Sequence[str], stdin: int, output: IO[bytes]) -> Copy:
        """Start `python -m MODULE ARGUMENTS` in a session of its own.

        Raises ValueError for another command, and OSError if the server is gone.
        """
        if tuple(command[:2]) != MODULE:
            raise ValueError(f"cannot start {command[0]}, but only {' '.join(MODULE)}")
        status, theirs = os.pipe()
        try:
            request = json.dumps(list(command[2:])).encode()
            socket.send_fds(self._requests, [request], [stdin, output.fileno(), theirs])
        except OSError:
            os.close(status)
            raise
        finally:
            os.close(theirs)
        return Copy(status)


def can_fork() -> bool:
    """Whether runs can be started this way: on Linux, where torch is known to bear it."""
    return sys.platform == "linux"


def main() -> None:
    """Serve, and in each copy run the module that was asked for."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for library in sys.argv[2:]:
        importlib.import_module(library)
    gc.freeze()  # a collection in a copy would otherwise write to, and so copy, all pages
    arguments = _serve(requests)
    if arguments is not None:
        sys.argv = ["", *arguments[1:]]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _serve(requests: socket.socket) -> list[str] | None:
    """Return None at the end, and in each copy what it is to run."""
    statuses: dict[int, int] = {}  # pid -> the pipe for its exit code
    ended, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    while True:
        ready = select.select([requests, ended], [], [])[0]
        if ended in ready:
            os.read(ended, 1024)
            _report(statuses)
        if requests not in ready:
            continue
        request, files, *_ = socket.recv_fds(requests, REQUEST_BYTES, 3)
        if not request:
            return None
        stdin, output, status = files
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.write(status, b"%d\n" % os.getpid())  # now there is a group to send signals to
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, file in enumerate((stdin, output, output)):
                os.dup2(file, number)
            for file in (stdin, output, status, ended, waker, *statuses.values()):
                os.close(file)
            requests.close()
            return json.loads(request)
        statuses[pid] = status
        os.close(stdin)
        os.close(output)


def _report(statuses: dict[int, int]) -> None:
    """Report the exit codes of the processes that have ended."""
    for pid in list(statuses):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            pipe = statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # the sweep was killed
                os.write(pipe, b"%d\n" % os.waitstatus_to_exitcode(status))
            os.close(pipe)


if __name__ == "__main__":
    main()
