"""The console, and how long things take, in words."""

import sys

from rich.console import Console


class StdoutConsole(Console):
    """Leaves it to whoever ends the process what becomes of a pipe that nobody reads any more."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """The one console. In a pipe a line is as long as it needs to be."""
    return StdoutConsole(
        width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True
    )


def span(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`, `5 d 6 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
