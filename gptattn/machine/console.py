"""The console, and durations in words."""

import logging
import sys
import warnings

from rich.console import Console


class StdoutConsole(Console):
    """Raises BrokenPipeError when the reader of a pipe has gone; rich's console would exit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console on stdout that leaves long lines whole."""
    return StdoutConsole(
        width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True
    )


def make_printable(text: str) -> str:
    """Replace control characters, which a model may generate and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def format_duration(seconds: float) -> str:
    """Return a duration in words: `40 s`, `12 min`, `3 h 20 min`, `5 d 6 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def quiet_lightning() -> None:
    """Leave the console to our own output: Lightning says nothing below an error."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
