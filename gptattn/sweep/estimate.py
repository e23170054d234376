"""How long runs will take, asked of a process of its own: a variant that crashes, hangs or takes
too much memory in the trial costs the estimate, and nothing else.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Self

from gptattn.settings.config import TrainConfig

STARTUP_SECONDS = 7.0  # imports, the device's matmul rate, the record's end
# The trial ends itself before, by trial.LIMIT_SECONDS; this also holds its imports.
PATIENCE_SECONDS = 150.0

# Rough seconds of each of these runs, alone on the machine; None: nobody knows.
Estimate = Callable[[Sequence[TrainConfig]], list[float] | None]


class Estimator:
    """Imports torch beside what the sweep does meanwhile, and answers once."""

    def __enter__(self) -> Self:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # not enough memory, or too many processes
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gptattn.sweep.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what is wrong with a variant, its own run will tell
                start_new_session=True,  # Ctrl-C is not for it
            )
        return self

    def __exit__(self, *args: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def expected_seconds(self, cfgs: Sequence[TrainConfig]) -> list[float] | None:
        """An `Estimate`. `cfgs` have been checked."""
        keys = [_work_key(cfg) for cfg in cfgs]
        different = dict(zip(keys, cfgs, strict=True))
        asked = json.dumps([asdict(cfg) for cfg in different.values()])
        if self._process is None:
            return None
        try:
            told = self._process.communicate(asked.encode(), PATIENCE_SECONDS)[0]
            answer = json.loads(told.splitlines()[-1])  # what a variant prints comes before
            work, rate = dict(zip(different, answer["work"], strict=True)), answer["rate"]
        except (subprocess.TimeoutExpired, OSError, ValueError, LookupError, TypeError):
            return None
        each = [work[key] for key in keys]
        return [STARTUP_SECONDS + seconds + flops / rate for flops, seconds in each]


def _work_key(cfg: TrainConfig) -> str:
    """Equal for runs that take as long: whatever their seed, starting weights and rates."""
    return repr(asdict(cfg) | {"seed": None, "init_from": None, "optim": None})
