"""What is still open of the sweeps that a report follows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Following:
    """What the page says of a sweep that is watched."""

    lines: list[str]
    seconds: float | None
