"""`speed.json`, in an experiment's folder: how fast its variants train and decode.

They were measured in turns (`training/speed.py`). Variants of one session are compared round by
round; those of different machines or numbers of threads are not.
"""

from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from gptattn.machine import disk
from gptattn.runs.metrics import (
    DECODING_MS,
    DECODING_SPEED,
    DECODING_SPEED_8,
    TRAINING_MFU,
    TRAINING_MS,
    TRAINING_SPEED,
)

NAME = "speed.json"


class Turns(msgspec.Struct, frozen=True):
    """What was measured of a variant: one value for each round."""

    code: str  # `Provenance.digest` of its runs
    step: list[float]  # seconds of a training step
    token: dict[int, list[float]]  # rows -> seconds of a decoded token; none without a cache


class Session(msgspec.Struct, frozen=True):
    """Variants that took turns, by `two_stages.variant_key`."""

    made: str  # its time, which identifies it
    device: str  # its name
    threads: int
    versions: dict[str, str]  # of libraries
    matmul: list[float]  # seconds of each FLOP of a matrix product, one for each round
    variants: dict[str, Turns]


class Measured(NamedTuple):
    """A variant's turns, and the session that they belong to."""

    turns: Turns
    session: Session

    @property
    def place(self) -> str:
        """Where it was measured, `2 threads, Intel(R) Xeon(R)`; speeds of others differ."""
        session = self.session
        return f"{session.threads} thread{'s' * (session.threads > 1)}, {session.device}"

    def list_metrics(self, tokens: int, flops: float) -> dict[str, float]:
        """Return medians under the names of metrics, for so many tokens a step and FLOPs a token.

        An MFU above 1 is left out: the machine was busy when its rate was measured.
        """
        step, token = median(self.turns.step), {r: median(t) for r, t in self.turns.token.items()}
        rounds = zip(self.session.matmul, self.turns.step, strict=True)
        mfu = tokens * flops * median(matmul / own for matmul, own in rounds)
        found = {TRAINING_SPEED: tokens / step, TRAINING_MS: 1e3 * step}
        found |= {TRAINING_MFU: mfu} if mfu <= 1 else {}
        if token:
            found |= {DECODING_SPEED: 1 / token[1], DECODING_MS: 1e3 * token[1]}
            found[DECODING_SPEED_8] = 8 / token[8]
        return found


def read_speeds(experiment: Path) -> list[Session]:
    """Return the sessions in the experiment's folder, the newest last; [] if none can be read."""
    try:
        return msgspec.json.decode((experiment / NAME).read_bytes(), type=list[Session])
    except (OSError, ValueError, msgspec.MsgspecError):
        return []


def add_speeds(experiment: Path, session: Session) -> None:
    """Add a session to the folder's. Raises DiskError if the disk refuses."""
    data = msgspec.json.format(msgspec.json.encode([*read_speeds(experiment), session]), indent=1)
    disk.write_atomically(experiment / NAME, lambda file: file.write(data + b"\n"))


def find_measured(experiment: Path, key: str, code: str) -> list[Measured]:
    """Return what was measured of the variant of this key with this code, the newest last."""
    sessions = read_speeds(experiment)
    found = [Measured(one.variants[key], one) for one in sessions if key in one.variants]
    return [one for one in found if one.turns.code == code]
