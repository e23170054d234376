"""The run folder's record: metrics.jsonl, the truth, and TensorBoard events, a view of it."""

import contextlib
import errno
import json
import os
import re
import secrets
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
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

KEPT = REFUSALS | {errno.ENOENT}  # errors of TensorBoard's thread that whoever writes next is told
BLOCK = 4096  # bytes: the least that a disk gives

# TensorBoard's HParams tab shows these as columns. The set is one and the same in every run: a
# key that the first run lacks would never be shown.
HPARAM_METRICS = (
    "val/loss",
    "perf/tokens_per_s",
    "cost/params",
    "cost/kv_bytes_per_token",
    "val/bits_per_byte",
    "train/loss",
    "perf/step_ms",
    "perf/peak_memory_training_mb",
    "cost/params_attention",
    "cost/flops_per_token",
)

# What the Custom Scalars tab opens on: a chart each, whose tags are regular expressions. The tab
# merges equal layouts, so that every run has it.
LAYOUT = {
    "training": {
        tag: ["Multiline", [f"{tag}$"]] for tag in ("val/loss", "train/loss", "perf/tokens_per_s")
    }
}


class RunRecorder(Logger):
    """A Lightning logger that writes each row to metrics.jsonl, at once, and to TensorBoard.

    `rows` are in the file already. TensorBoard hides what is there from `purge_step` on.
    """

    def __init__(self, folder: RunFolder, rows: int = 0, purge_step: int | None = None) -> None:
        super().__init__()
        self.folder, self.rows = folder, rows
        # Unbuffered: what a full disk has refused must not be tried again at the end.
        self._rows = open_to_append(folder.rows_file)
        self._end_of_session: Any = None
        self._hook, threading.excepthook = threading.excepthook, self._thread_failed
        with self._tensorboard():
            # TensorBoard's own name for the file could be guessed, and a link be put there.
            self._writer = SummaryWriter(
                str(folder.path),
                flush_secs=10,
                purge_step=purge_step,
                filename_suffix=f".{secrets.token_hex(8)}",
            )
            self._writer.add_custom_scalars(LAYOUT)

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        # The thread that writes the events keeps its error for whoever writes or flushes next.
        known = isinstance(args.exc_value, OSError) and args.exc_value.errno in KEPT
        if not known:
            self._hook(args)

    @contextlib.contextmanager
    def _tensorboard(self) -> Iterator[None]:
        """Errors of the events' file, of which nobody knows how much it has still to write."""
        self._check_place()
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
        metrics = dict.fromkeys(HPARAM_METRICS, 0.0)  # only the tags count; values come later
        experiment, session, self._end_of_session = hparams(dict(values), metrics)
        with self._tensorboard():
            self._events().add_summary(experiment)
            self._events().add_summary(session)

    def _events(self) -> Any:
        return self._writer._get_file_writer()

    def log_metrics(self, metrics: Mapping[str, float | None], step: int | None = None) -> None:
        """A row; what is None is null there, and no point in TensorBoard."""
        with self._tensorboard():
            for name, value in metrics.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
        self._write_row(step, metrics)

    def log_text(self, tag: str, text: str, step: int) -> None:
        with self._tensorboard():
            self._writer.add_text(tag, _inert(text), step)
        self._write_row(step, {tag: text})

    def log_image(self, tag: str, image: NDArray[np.uint8], step: int) -> None:
        """`image` is [height, width, 3]."""
        with self._tensorboard():
            self._writer.add_image(tag, image, step, dataformats="HWC")

    def _write_row(self, step: int | None, values: Mapping[str, Any]) -> None:
        row = {"step": step, "time": round(time.time(), 3), **values}
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        with writing(self.folder.rows_file, lambda: len(line)):
            if self._rows.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.rows += 1

    def _check_place(self) -> None:
        """Raise DiskError where the rows have no name any more: they would be lost unseen."""
        if not self.folder.path.is_dir():
            raise gone(self.folder.path)
        if not os.path.lexists(self.folder.rows_file):
            raise DiskError(
                str(self.folder.rows_file),
                "is gone, removed or moved meanwhile; put it back, then resume=... goes on",
            )

    def save(self) -> None:
        """Bring all rows onto the disk."""
        with self._tensorboard():
            self._writer.flush()
        with writing(self.folder.rows_file, lambda: BLOCK):
            os.fsync(self._rows.fileno())

    def close(self, done: bool) -> None:
        """End the record; a run that is done is shown so in the HParams tab.

        What the disk refuses is an error only then: otherwise there is one already.
        """
        may_fail = contextlib.nullcontext() if done else contextlib.suppress(DiskError)
        with may_fail, self._tensorboard():
            if done and self._end_of_session is not None:
                self._events().add_summary(self._end_of_session)
            self._writer.close()
        self._rows.close()
        threading.excepthook = self._hook


def _inert(text: str) -> str:
    """The text as TensorBoard shows it without reading anything into it.

    Indented by four, Markdown shows it as it is. Where Markdown is off, TensorBoard lets links and
    images through, so that no tag may open: a < has an invisible word joiner behind it.
    """
    lines = ("    " + line for line in text.splitlines())
    return re.sub(r"<(?=[A-Za-z/!?])", "<\u2060", "\n".join(lines))
