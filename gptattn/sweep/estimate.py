"""Estimates how long runs will take, in a separate process: if a variant crashes, hangs or takes
too much memory there, only the estimate is lost.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Self

from gptattn.settings.config import TrainConfig

STARTUP_SECONDS = 7.0  # per run: imports, measuring the matmul rate, writing the summary
# The trial's imports, and trial.LIMIT_SECONDS for the rest, which it enforces itself.
PATIENCE_SECONDS = 150.0

# A function that returns the rough seconds of each run, alone on the machine; None: unknown.
Estimate = Callable[[Sequence[TrainConfig]], list[float] | None]


class Estimator:
    """Context manager that starts the trial process early: it imports torch while the sweep plans.

    `expected_seconds` can be called once.
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
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def expected_seconds(self, cfgs: Sequence[TrainConfig]) -> list[float] | None:
        """Return the rough seconds of each run, or None: see `Estimate`. `cfgs` must be checked."""
        keys = [_work_key(cfg) for cfg in cfgs]
        different = dict(zip(keys, cfgs, strict=True))
        asked = json.dumps([asdict(cfg) for cfg in different.values()])
        if self._process is None:
            return None
        try:
            output = self._process.communicate(asked.encode(), PATIENCE_SECONDS)[0]
            answer = json.loads(output.splitlines()[-1])  # a variant may print lines before
            work, rate = dict(zip(different, answer["work"], strict=True)), answer["rate"]
        except (subprocess.TimeoutExpired, OSError, ValueError, LookupError, TypeError):
            return None
        each = [work[key] for key in keys]
        return [STARTUP_SECONDS + seconds + flops / rate for flops, seconds in each]


def _work_key(cfg: TrainConfig) -> str:
    """Return a key without seed, starting weights and optimizer: they do not change the time."""
    return repr(asdict(cfg) | {"seed": None, "init_from": None, "optim": None})
