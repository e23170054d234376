"""`until.json`, the record of a `sweep.until`: the seeds it began with.

Their spread decided how many seeds followed, so a report must know them.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from gptattn.settings.identity import settings_key

NAME = "until.json"


class FirstStage(NamedTuple):
    """The seeds that a variant began with, and the half-width that its interval should reach."""

    first: tuple[int, ...]
    half_width: float  # nats


class TwoStages(msgspec.Struct, frozen=True):
    """The seeds that a sweep began with, and the half-widths, nats, by `variant_key`."""

    first: Annotated[tuple[int, ...], Meta(min_length=1)]
    half_widths: dict[str, Annotated[float, Meta(ge=1e-6, le=100)]]

    def of(self, settings: Mapping[str, Any]) -> FirstStage | None:
        """Return the first stage of a run with these settings; None if it had none."""
        half_width = self.half_widths.get(variant_key(settings))
        return None if half_width is None else FirstStage(self.first, half_width)


def variant_key(settings: Mapping[str, Any]) -> str:
    """Return a key that is equal for settings, as in config.yaml, that differ only in the seed."""
    return hashlib.sha256(settings_key({**settings, "seed": 0}).encode()).hexdigest()[:16]
