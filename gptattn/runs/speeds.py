"""`speed.json`, in an experiment's folder: how fast its variants train and decode.

The variants took turns (`training/speed.py`). Variants of one session are compared round by round;
those measured on different machines, or with different numbers of threads, are not.
"""

from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

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


Seconds = list[Annotated[float, Meta(gt=0, le=1e9)]]  # one value for each round


class Turns(msgspec.Struct, frozen=True):
    """A variant's measurements."""

    code: str  # `Provenance.digest` of its runs
    step: Seconds  # per training step
    token: dict[int, Seconds]  # rows, 1 and 8 -> per decoded token; empty without a cache
    matmul: Seconds  # per FLOP of a matrix product in its precision


class Session(msgspec.Struct, frozen=True):
    """Variants that took turns, by `two_stages.variant_key`."""

    timestamp: str = msgspec.field(name="made")  # its time, which identifies it
    device: str  # its name
    threads: int
    versions: dict[str, str]  # of libraries
    variants: dict[str, Turns]


class Measurement(NamedTuple):
    """A variant's turns, and their session."""

    turns: Turns
    session: Session
    metrics: dict[str, float]

    @property
    def place(self) -> str:
        """Where it was measured, as `2 threads, Intel(R) Xeon(R)`; speeds elsewhere differ."""
        session = self.session
        return f"{session.threads} thread{'s' * (session.threads > 1)}, {session.device}"


def add_speeds(experiment: Path, session: Session) -> None:
    """Add a session to the folder's. Raises RunFolderError for a file that is not ours."""
    sessions = disk.read_json(experiment / NAME, list[Session]) or []
    if not sessions:
        disk.refuse_taken(experiment, "speed", NAME)
    disk.write_json(experiment / NAME, [*sessions, session])


def find_measured(
    experiment: Path, key: str, code: str, tokens: int, flops: float
) -> list[Measurement]:
    """Return the measurements of the variant with this key and code, newest last.

    `tokens`: per training step. `flops`: per token.
    """
    sessions = disk.read_json(experiment / NAME, list[Session]) or []
    pairs = [(one.variants.get(key), one) for one in sessions]
    return [
        Measurement(turns, session, _list_metrics(turns, tokens, flops))
        for turns, session in pairs
        if turns is not None and turns.code == code
    ]


def _list_metrics(turns: Turns, tokens: int, flops: float) -> dict[str, float]:
    """Return medians over rounds; an MFU above 1 is left out: the machine was busy."""
    step = median(turns.step)
    rates = zip(turns.matmul, turns.step, strict=True)
    mfu = tokens * flops * median(matmul / own for matmul, own in rates)
    metrics = {TRAINING_SPEED: tokens / step, TRAINING_MS: 1e3 * step}
    metrics |= {TRAINING_MFU: mfu} if mfu <= 1 else {}
    if turns.token:
        one, eight = median(turns.token[1]), median(turns.token[8])
        metrics |= {DECODING_SPEED: 1 / one, DECODING_MS: 1e3 * one, DECODING_SPEED_8: 8 / eight}
    return metrics
