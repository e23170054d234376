"""One run of a sweep: `python -m gptattn.sweep.worker OVERRIDES`, started by the sweep.

The same as `gptattn-train OVERRIDES`, but it ends when the sweep's own process does: the pipe that
is its stdin closes then, however that process died.
"""

import os
import signal
import sys
import threading

from gptattn.cli import main


def _end_with_the_sweep() -> None:
    # Not through sys.stdin: its lock, held by this thread, would break the interpreter's end.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    sys.argv.append("--debug")  # what it prints is a log, where a traceback has its place
    main()
