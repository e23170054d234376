"""Makes one run of a sweep: `python -m gptattn.cli.worker OVERRIDES`, started by the sweep.

With `--seeds=` it makes a run of each seed given, all of them as one model. `--beside-others` says
that other runs are at work meanwhile, so that the speed is not the run's own.

The same as `gptattn-train OVERRIDES`, but it ends when the sweep's process ends, even by a kill:
its stdin is a pipe from that process, which closes then.
"""

import os
import signal
import sys
import threading

from gptattn.cli.main import main
from gptattn.sweep.sharing import BESIDE_OTHERS
from gptattn.sweep.vectorize import SEEDS, read_seeds


def _end_with_the_sweep(pipe: int) -> None:
    # Not sys.stdin: this thread would hold its lock when the interpreter shuts down, which aborts.
    while os.read(pipe, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sweep = os.dup(0)
    # Code that reads stdin, such as a debugger, gets end of file at once.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with_the_sweep, args=(sweep,), daemon=True).start()
    seeds = [argument for argument in sys.argv if argument.startswith(SEEDS)]
    beside = BESIDE_OTHERS in sys.argv
    sys.argv = [argument for argument in sys.argv if argument not in (*seeds, BESIDE_OTHERS)]
    sys.argv.append("--debug")  # its output goes to a log file, which should have tracebacks
    main(read_seeds(seeds[0]) if seeds else None, beside_others=beside)
