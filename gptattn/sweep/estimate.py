"""Estimates how long runs will take, in a separate process: if a variant crashes, hangs or takes
too much memory there, only the estimate is lost.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Self

from gptattn.settings.config import TrainConfig
from gptattn.sweep.sharing import Share

STARTUP_SECONDS = 7.0  # per run: imports, measuring the matmul rate, writing the summary
# The trial's imports, and trial.LIMIT_SECONDS for the rest, which it enforces itself.
PATIENCE_SECONDS = 150.0

# A function that gives the rough seconds of each run, for each way to share the machine that has
# room for them in memory; the first one always has. None: unknown.
Estimate = Callable[[Sequence[TrainConfig], Sequence[Share]], dict[Share, list[float]] | None]


class Estimator:
    """Context manager that starts the trial process early: it imports torch while the sweep plans.

    `timing` can be called once.
    """

    def __enter__(self) -> Self:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # not enough memory, or too many processes
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gptattn.sweep.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a broken variant is reported by its own run
                start_new_session=True,  # keeps Ctrl-C away from it
            )
        return self

    def __exit__(self, *args: object) -> None:
        self._end()

    def _end(self) -> None:
        """End the trial and its copies: those hold its output open."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None

    def timing(
        self, cfgs: Sequence[TrainConfig], shares: Sequence[Share]
    ) -> dict[Share, list[float]] | None:
        """Time the heaviest run; see `Estimate`. `cfgs` must be checked."""
        keys = [_work_key(cfg) for cfg in cfgs]
        different = dict(zip(keys, cfgs, strict=True))
        asked = json.dumps([[asdict(x) for x in some] for some in (different.values(), shares)])
        if self._process is None:
            return None
        try:
            output = self._process.communicate(asked.encode(), PATIENCE_SECONDS)[0]
            answer = json.loads(output.splitlines()[-1])  # a variant may print lines before
            work = dict(zip(different, answer["work"], strict=True))
            rates = dict(zip(shares, answer["rates"], strict=True))
            return {
                share: [_seconds(work[key], float(rate) / share.jobs) for key in keys]
                for share, rate in rates.items()
                if rate is not None
            }
        except (subprocess.TimeoutExpired, OSError, ValueError, LookupError, TypeError):
            return None
        finally:
            self._end()  # now, since a pid may be another process's once it is long gone


def _seconds(work: Sequence[float], rate: float) -> float:
    flops, fixed = work
    return STARTUP_SECONDS + fixed + flops / rate


def _work_key(cfg: TrainConfig) -> str:
    """Return a key without seed, starting weights and optimizer: they do not change the time."""
    return repr(asdict(cfg) | {"seed": None, "init_from": None, "optim": None})
