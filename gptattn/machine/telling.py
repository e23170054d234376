"""Says how far something slow has come that goes through many bytes."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gptattn.machine.console import span

QUIET_SECONDS = 2.0  # at the start: what is done by then needs no words
LINE_SECONDS = 10.0  # between lines where there is no terminal


@contextlib.contextmanager
def telling(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes that have been done, of `size` in all.

    After two seconds a bar appears on stderr, or a line every ten seconds if that is no terminal.
    """
    told = _Told(what, size)
    try:
        yield told.add
    finally:
        told.end()


def told(pieces: Iterable[str], advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the pieces of a text; tell of each when the next is asked for."""
    for piece in pieces:
        yield piece
        advance(len(piece))  # of characters, which are about as many as the bytes


class _Told:
    def __init__(self, what: str, size: int) -> None:
        self.what, self.size = what, size
        self._begun = self._last = time.monotonic()
        self._done, self._said = 0, -1  # bytes; nothing said
        self._bar: Progress | None = None

    def add(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if now - self._begun < QUIET_SECONDS:
            return
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = _bar()
                self._bar.add_task(self.what, total=self.size or None)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._said < 0 or now - self._last >= LINE_SECONDS:
            self._say(now)

    def _say(self, now: float) -> None:
        self._said, self._last = self._done, now
        rate = self._done / (now - self._begun)
        if not self._done:
            print(f"{self.what}: {self.size / 1e6:,.0f} MB", file=sys.stderr, flush=True)
            return
        left = ""
        if self._done < self.size:
            left = f" of {self.size / 1e6:,.0f} MB, {span((self.size - self._done) / rate)} left"
        done = f"{self._done / 1e6:,.0f}{left or ' MB'}"
        print(f"{self.what}: {done}, {rate / 1e6:.1f} MB/s", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif 0 <= self._said < self._done:
            self._say(time.monotonic())


def _bar() -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
