"""Progress for slow reads, on stderr: a bar on a terminal, and lines elsewhere."""

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
def show_progress(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes that have been done, of `size` in all; 0: unknown."""
    bar = Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what, total=size or None)
    begun = time.monotonic()
    done, next_line = 0, begun + QUIET_SECONDS

    def advance(count: int) -> None:
        nonlocal done, next_line
        done += count
        bar.update(task, completed=done)
        now = time.monotonic()
        if now < next_line:
            return
        if bar.console.is_terminal:
            bar.start()
            return
        next_line = now + LINE_SECONDS
        rate = done / (now - begun)
        of = f" of {size / 1e6:,.0f}" if size else ""
        left = f", {span((size - done) / rate)} left" if 0 < done < size else ""
        line = f"{what}: {done / 1e6:,.0f}{of} MB{left}, {rate / 1e6:.1f} MB/s"
        print(line, file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def with_progress(pieces: Iterable[str], advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the pieces of a text; `advance` by each when the next is asked for."""
    for piece in pieces:
        yield piece
        advance(len(piece))  # of characters, which are about as many as the bytes
