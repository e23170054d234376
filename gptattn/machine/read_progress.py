"""Progress for slow reads, on stderr."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

QUIET_SECONDS = 2.0  # at the start; quicker reads show nothing
LOG_SECONDS = 4.0  # between lines where there is no terminal
tqdm.monitor_interval = 0  # no thread that redraws bars while nothing is read


@contextlib.contextmanager
def show_progress(what: str, size: int) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the bytes just read, of `size` in all; 0: unknown."""
    with tqdm(
        desc=what,
        total=size or None,
        unit="B",
        unit_scale=True,
        delay=QUIET_SECONDS,
        mininterval=0.2 if sys.stderr.isatty() else LOG_SECONDS,
        leave=False,
    ) as bar:
        yield bar.update
