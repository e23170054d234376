"""Estimates how long runs will take, in a separate process: if a variant crashes, hangs or takes
too much memory there, only the estimate is lost.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from gptattn.settings.config import TrainConfig
from gptattn.sweep.sharing import Share

STARTUP_SECONDS = 7.0  # per run: imports, measuring the matmul rate, writing the summary
# The trial's imports, and trial.LIMIT_SECONDS for the rest, which it enforces itself.
PATIENCE_SECONDS = 150.0


@dataclass(frozen=True)
class Timing:
    """The rough seconds of each run, beside others as `share` says, which is the best of those
    asked for; `gain` is its throughput, relative to the first one's.
    """

    seconds: list[float]
    share: Share
    gain: float


# A function that times runs in some ways to share the machine; None: unknown.
Estimate = Callable[[Sequence[TrainConfig], Sequence[Share]], Timing | None]


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
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def timing(self, cfgs: Sequence[TrainConfig], shares: Sequence[Share]) -> Timing | None:
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
            rates = dict(zip(shares, map(float, answer["rates"]), strict=True))
        except (subprocess.TimeoutExpired, OSError, ValueError, LookupError, TypeError):
            return None
        best = max(shares, key=lambda share: rates[share])
        each = rates[best] / best.jobs
        seconds = [
            STARTUP_SECONDS + own + flops / each for flops, own in (work[key] for key in keys)
        ]
        return Timing(seconds, best, rates[best] / rates[shares[0]])


def _work_key(cfg: TrainConfig) -> str:
    """Return a key without seed, starting weights and optimizer: they do not change the time."""
    return repr(asdict(cfg) | {"seed": None, "init_from": None, "optim": None})
