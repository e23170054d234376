"""Write a run's record: metrics.jsonl, the source of truth, and TensorBoard events."""

import contextlib
import errno
import json
import os
import re
import secrets
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lightning.pytorch.loggers.logger import Logger
from numpy.typing import NDArray
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from gptattn.errors import DiskError
from gptattn.machine.disk import REFUSALS, gone, writing
from gptattn.machine.untrusted import open_to_append
from gptattn.runs.folder import RunFolder
from gptattn.training.trackers.feed import Feed

# Errors of TensorBoard's thread that its next write raises again.
RAISED_LATER = REFUSALS | {errno.ENOENT}
BLOCK = 4096  # bytes: the smallest unit that a disk allocates

BITS, ACCURACY = "val/bits_per_byte", "val/accuracy"  # of a text, of a task

# TensorBoard's HParams tab shows these as columns. All runs of texts have the same keys, and all
# runs of tasks, since the tab never shows a key that the first run lacks.
HPARAM_METRICS = (
    "val/loss",
    "perf/tokens_per_s",
    "cost/params",
    "cost/kv_bytes_per_token",
    BITS,
    "train/loss",
    "perf/step_ms",
    "perf/peak_memory_training_mb",
    "cost/params_attention",
    "cost/flops_per_token",
)

# The charts of the Custom Scalars tab, which merges equal ones of several runs.
CHARTS = ("val/loss", "train/loss", "perf/tokens_per_s")


class RunRecorder(Logger):
    """A Lightning logger that writes each row to metrics.jsonl, unbuffered, and to TensorBoard.

    `rows` is the number of rows already in the file. TensorBoard hides earlier events from step
    `purge_step` on. `of_task`: the run has an accuracy in place of bits per byte. `feeds`: of the
    trackers that get the same metrics.
    """

    def __init__(
        self,
        folder: RunFolder,
        rows: int = 0,
        purge_step: int | None = None,
        *,
        of_task: bool = False,
        feeds: Sequence[Feed] = (),
    ) -> None:
        super().__init__()
        self._feeds = feeds
        self.folder, self.rows, self.of_task = folder, rows, of_task
        # Unbuffered: closing the file must not retry a write that a full disk has refused.
        self._rows = open_to_append(folder.rows_file)
        self._end_of_session: Any = None
        self._hook, threading.excepthook = threading.excepthook, self._thread_failed
        with self._tensorboard():
            # A random suffix, since TensorBoard's own file name can be guessed: another user could
            # put a link in its place.
            self._writer = SummaryWriter(
                str(folder.path),
                flush_secs=10,
                purge_step=purge_step,
                filename_suffix=f".{secrets.token_hex(8)}",
            )
            charts = (*CHARTS, ACCURACY) if of_task else CHARTS
            # The tags are regular expressions.
            layout = {tag: ["Multiline", [f"{tag}$"]] for tag in charts}
            self._writer.add_custom_scalars({"training": layout})

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        # TensorBoard's writer thread keeps its error and raises it at the next write or flush.
        known = isinstance(args.exc_value, OSError) and args.exc_value.errno in RAISED_LATER
        if not known:
            self._hook(args)

    @contextlib.contextmanager
    def _tensorboard(self) -> Iterator[None]:
        """Raise DiskError if the record is gone or a write of events fails.

        How many bytes of events are still pending is unknown, so the error names one block.
        """
        self._check_record_exists()
        with writing(self.folder.events_file, lambda: BLOCK):
            yield

    @property
    def name(self) -> str:
        return self.folder.path.parent.name

    @property
    def version(self) -> str:
        return self.folder.path.name

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Declare this run as a row of the HParams tab. Values are numbers, strings or bools."""
        values = vars(params) if isinstance(params, Namespace) else params
        tags = (ACCURACY if t == BITS and self.of_task else t for t in HPARAM_METRICS)
        metrics = dict.fromkeys(tags, 0.0)  # only the tags count; values come later
        experiment, session, self._end_of_session = hparams(dict(values), metrics)
        with self._tensorboard():
            self._events().add_summary(experiment)
            self._events().add_summary(session)

    def _events(self) -> Any:
        return self._writer._get_file_writer()

    def log_metrics(self, metrics: Mapping[str, float | None], step: int | None = None) -> None:
        """Write a row. None becomes null in metrics.jsonl and no point in TensorBoard."""
        with self._tensorboard():
            for name, value in metrics.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
        self._write_row(step, metrics)
        for feed in self._feeds:
            feed.row(step or 0, metrics, self.rows)

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a row with this text, which TensorBoard shows without interpreting it."""
        with self._tensorboard():
            self._writer.add_text(tag, _literal(text), step)
        self._write_row(step, {tag: text})

    def log_image(self, tag: str, image: NDArray[np.uint8], step: int) -> None:
        """Write `image` [height, width, 3] to TensorBoard only."""
        with self._tensorboard():
            self._writer.add_image(tag, image, step, dataformats="HWC")

    def _write_row(self, step: int | None, values: Mapping[str, Any]) -> None:
        row = {"step": step, "time": round(time.time(), 3), **values}
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        with writing(self.folder.rows_file, lambda: len(line)):
            if self._rows.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.rows += 1

    def _check_record_exists(self) -> None:
        """Raise DiskError if the folder or metrics.jsonl is gone.

        Writes to the deleted file would succeed, and their rows be lost silently.
        """
        if not self.folder.path.is_dir():
            raise gone(self.folder.path)
        if not os.path.lexists(self.folder.rows_file):
            raise DiskError(
                str(self.folder.rows_file),
                "was removed or moved during the run; put it back and use resume=...",
            )

    def save(self) -> None:
        """Flush all rows and events to the disk."""
        with self._tensorboard():
            self._writer.flush()
        with writing(self.folder.rows_file, lambda: BLOCK):
            os.fsync(self._rows.fileno())
        for feed in self._feeds:
            feed.save(self.rows)

    def close(self, done: bool) -> None:
        """Close the record. With `done`, the HParams tab shows the run as finished.

        Without `done`, disk errors are suppressed: another error is already ending the run.
        """
        for feed in self._feeds:
            feed.end(done, self.rows)
        may_fail = contextlib.nullcontext() if done else contextlib.suppress(DiskError)
        # The trackers come last: who does not want to wait for one loses nothing of the record.
        try:
            with may_fail, self._tensorboard():
                if done and self._end_of_session is not None:
                    self._events().add_summary(self._end_of_session)
                self._writer.close()
            self._rows.close()
            threading.excepthook = self._hook
        finally:
            for feed in self._feeds:
                feed.wait(done)


class NoRecord(RunRecorder):
    """Records nothing: another process of the run writes the record."""

    def __init__(self, folder: RunFolder) -> None:
        Logger.__init__(self)
        self.folder, self.rows = folder, 0

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float | None], step: int | None = None) -> None:
        pass

    def log_text(self, tag: str, text: str, step: int) -> None:
        pass

    def log_image(self, tag: str, image: NDArray[np.uint8], step: int) -> None:
        pass

    def save(self) -> None:
        pass

    def close(self, done: bool) -> None:
        pass


def _literal(text: str) -> str:
    """Return the text in a form that TensorBoard shows literally.

    Markdown shows lines indented by four spaces as they are. Where Markdown is off, TensorBoard
    renders HTML links and images; an invisible word joiner after each < keeps tags from opening.
    """
    lines = ("    " + line for line in text.splitlines())
    return re.sub(r"<(?=[A-Za-z/!?])", "<\u2060", "\n".join(lines))
