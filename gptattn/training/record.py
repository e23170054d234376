"""A run's record: metrics.jsonl, the source of truth, and what TensorBoard and others show."""

import errno
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.tensorboard.summary import hparams

from gptattn.errors import ConfigError, UserError
from gptattn.machine.disk import explain_disk_errors
from gptattn.runs.events import declare_columns, write_events
from gptattn.runs.folder import RunFolder
from gptattn.runs.metrics import ACCURACY, FIRST_COLUMNS, LOSS, MEMORY, SPEED, TRAIN_LOSS
from gptattn.settings.config import TrainConfig
from gptattn.settings.construct import construct

# The charts of the Custom Scalars tab, which merges those that several runs share.
CHARTS = (LOSS, SPEED, "train/lr", TRAIN_LOSS)


class MetricsFile(Logger):
    """A Lightning logger that writes each row to metrics.jsonl, unbuffered.

    Raises DiskError if the disk refuses.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        # Unbuffered: closing the file must not retry a write that a full disk has refused.
        self._file = folder.rows_file.open("ab", buffering=0)

    @property
    def name(self) -> str:
        return self.folder.path.parent.name

    @property
    def version(self) -> str:
        return self.folder.path.name

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has them."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row; None becomes null."""
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        with explain_disk_errors(self.folder.rows_file):
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @property
    def size(self) -> int:
        """The bytes of all rows in the file."""
        return self._file.tell()

    def save(self) -> None:
        """Flush all rows to the disk."""
        with explain_disk_errors(self.folder.rows_file):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class RunTensorBoard(TensorBoardLogger):
    """Lightning's TensorBoard logger for a run's folder, with charts, HParams and texts.

    `of_task`: the run has an accuracy in place of bits per byte.
    """

    def __init__(self, folder: RunFolder, of_task: bool, purge_step: int | None = None) -> None:
        options = {"default_hp_metric": False, "flush_secs": 10, "purge_step": purge_step}
        super().__init__(folder.path, name="", version="", **options)
        self._folder, self._of_task = folder.path, of_task
        self._end_of_session: Any = None

    @property
    def log_dir(self) -> str:
        """The run's folder as it is: Lightning would expand `~` and `$NAME` in it."""
        return str(self._folder)

    def declare(self, hyperparameters: Mapping[str, Any]) -> None:
        """Lay out the charts, and declare the run as a row of the HParams tab."""
        # These serve until a report knows which settings vary.
        metrics = [*[ACCURACY] * self._of_task, LOSS, SPEED, TRAIN_LOSS, MEMORY]
        columns = declare_columns((*FIRST_COLUMNS, "lr", "seed"), metrics)
        write_events(self._folder, [(columns, 0)])
        # The tags are regular expressions.
        charts = (ACCURACY, *CHARTS) if self._of_task else CHARTS
        layout = {tag: ["Multiline", [f"{tag}$"]] for tag in charts}
        self.experiment.add_custom_scalars({"training": layout})
        _, session, end = hparams(dict(hyperparameters), {})
        self.experiment.file_writer.add_summary(session)
        self._end_of_session = end

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Show a text as it is: Markdown keeps lines indented by four spaces."""
        lines = ("    " + line for line in text.splitlines())
        # An invisible word joiner after each < keeps HTML tags from opening.
        markdown = re.sub(r"<(?=[A-Za-z/!?])", "<\u2060", "\n".join(lines))
        self.experiment.add_text(tag, markdown, step)

    def save(self) -> None:
        """Flush the events; Lightning's own would add an hparams.yaml."""
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        """Close the file; after a success, the HParams tab shows the run as finished."""
        if status == "success" and self._end_of_session is not None:
            self.experiment.file_writer.add_summary(self._end_of_session)
        super().finalize(status)


def open_trackers(
    cfg: TrainConfig, folder: RunFolder, step: int, hyperparameters: Mapping[str, Any]
) -> list[Logger]:
    """Return the loggers that the settings name besides TensorBoard, which is always on.

    `step`: the one after which the run resumes. Raises ConfigError if one cannot be opened.
    """
    loggers = []
    names = {
        "folder": str(folder.path.absolute()),
        "run": folder.path.name,
        "experiment": cfg.experiment_name,
        "variant": cfg.variant,
        "seed": cfg.seed,
        "step": step,
    }
    for name, spec in cfg.logger.items():
        if not spec:
            continue  # TensorBoard
        try:
            filled = apply_to_collection(dict(spec), str, lambda text: text.format(**names))
            logger = construct(f"logger.{name}", filled, {}, cfg.allow_targets, Logger)
            logger.log_hyperparams(dict(hyperparameters))
        except UserError:
            raise
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise ConfigError("logger", f"{name} cannot be opened ({why}); leave it out") from error
        loggers.append(logger)
    return loggers


def log_row(loggers: Sequence[Logger], row: Mapping[str, Any], step: int) -> None:
    """Log a row to the record and to all trackers, which get no nulls.

    Raises DiskError if the disk refuses.
    """
    numbers = {name: value for name, value in row.items() if value is not None}
    for logger in loggers:
        try:
            logger.log_metrics(dict(row) if isinstance(logger, MetricsFile) else numbers, step)
        except ValueError as error:  # of TensorBoard's thread, as Lightning passes it on
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise
