"""End a run that hangs, and show the stack of each thread."""

import contextlib
import faulthandler
import os
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import lightning.pytorch as L

LOOK_SECONDS = 1.0  # between two looks for a sign of life
SPARE_SECONDS = 20.0  # after the limit, until faulthandler's timer ends the process


class Watchdog(L.Callback):
    """Ends the process with exit code 1 after `limit` seconds without a sign of life.

    Signs of life are the start and end of each training or validation batch, and the end of a
    validation. The stacks of all threads are written to stderr first. The checkpoints stay; the
    state since the newest one is lost, as a hung process cannot save it. `limit` None: no watch.

    faulthandler's own timer, restarted at each sign of life, would not do: it ends the process
    without our message, and a process that was paused would count as hung.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._signs, self._newest = 0, "the start"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for as long as this context is open."""
        if self.limit is None:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over, self.limit), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, over: threading.Event, limit: float) -> None:
        # Counts its own wake-ups, not clock time: a process that was paused has not hung.
        signs, idle = self._signs, 0.0
        while idle < limit:
            # A read of a memory-mapped file that stalls holds the GIL, so this thread cannot run.
            # faulthandler's timer needs no GIL, and ends the process then.
            faulthandler.dump_traceback_later(limit - idle + SPARE_SECONDS, exit=True, file=2)
            if over.wait(min(LOOK_SECONDS, limit)):
                return
            idle = idle + LOOK_SECONDS if signs == self._signs else 0.0
            signs = self._signs
        self._end(limit)

    def _end(self, limit: float) -> NoReturn:
        faulthandler.dump_traceback(file=2)
        line = (
            f"error: hang_seconds: no progress for {limit:g} s after {self._newest}; stacks above; "
            "resume=... continues from the newest checkpoint, or give more hang_seconds\n"
        )
        os.write(2, line.encode())
        os._exit(1)

    def _sign(self, newest: str) -> None:
        self._signs += 1
        self._newest = newest

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._sign(f"receiving the batch of step {trainer.global_step + 1}")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._sign(f"step {trainer.global_step}")

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._sign(f"receiving a batch of the validation at step {trainer.global_step}")

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._sign(f"a batch of the validation at step {trainer.global_step}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sign(f"the validation at step {trainer.global_step}")
