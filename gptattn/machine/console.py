"""The console, and how durations are shown."""

import logging
import sys
import warnings
from datetime import timedelta

from rich.console import Console


class StdoutConsole(Console):
    """Raises BrokenPipeError when a pipe's reader has gone; rich's own console would exit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console on stdout that does not break long lines."""
    width = None if sys.stdout.isatty() else 120
    return StdoutConsole(width=width, highlight=False, emoji=False, soft_wrap=True)


def make_printable(text: str) -> str:
    """Replace control characters, which a model may generate and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def format_duration(seconds: float) -> str:
    """Return a duration as `0:00:40`, `3:20:00` or `5 days, 6:00:00`."""
    return str(timedelta(seconds=round(seconds)))


def quiet_lightning() -> None:
    """Leave the console to our own output: Lightning logs nothing below an error."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
