"""TensorBoard events in a file next to a run's own, which a later report replaces."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.hparams.summary_v2 import HParam, Metric, hparams_config_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from gptattn.machine.disk import write_atomically

# TensorBoard may read a folder's files by name, each once to its end, so this file must come before
# the run's own, which grows.
EVENTS = "events.out.tfevents.0.gptattn"


def write_events(folder: Path, summaries: Iterable[tuple[Any, int]]) -> None:
    """Write or replace the folder's EVENTS: summaries with their steps. Raises DiskError."""
    lines = [{"file_version": "brain.Event:2"}]
    lines += [{"summary": summary, "step": step} for summary, step in summaries]
    make: Any = event_pb2.Event  # type: ignore[attr-defined]
    data = [make(wall_time=time.time(), **line).SerializeToString() for line in lines]
    write_atomically(folder / EVENTS, lambda file: [*map(RecordWriter(file).write, data)])


def declare_columns(hyperparameters: Iterable[str], metrics: Iterable[str]) -> Any:
    """Return a summary with the columns of the HParams tab, which shows five of each at first.

    For several runs, the tab takes the columns from any one of them.
    """
    return hparams_config_pb([*map(HParam, hyperparameters)], [*map(Metric, metrics)])
