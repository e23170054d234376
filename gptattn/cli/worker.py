"""One run of a sweep: `python -m gptattn.cli.worker OVERRIDES`, started by the sweep.

The same as `gptattn-train OVERRIDES`, but it ends when the sweep's own process does: the pipe that
is its stdin closes then, however that process died.
"""

import os
import signal
import sys
import threading

from gptattn.cli.main import main


def _end_with_the_sweep(pipe: int) -> None:
    # Not through sys.stdin: its lock, held by this thread, would break the interpreter's end.
    while os.read(pipe, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sweep = os.dup(0)
    # Whoever reads stdin, a debugger for one, finds its end at once.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with_the_sweep, args=(sweep,), daemon=True).start()
    sys.argv.append("--debug")  # what it prints is a log, where a traceback has its place
    main()
