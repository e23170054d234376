"""TensorBoard events that a later report replaces, in files of their own beside those of runs.

Each is named by what wrote it, `events.out.tfevents.*.{kind}.gptattn`.
"""
# pyright: reportAttributeAccessIssue=false
# Protobuf defines its classes at import.

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MarginChartContent
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, create_summary_metadata
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from gptattn.machine.disk import write_atomically

OF_RUN, OF_REPORT = "run", "report"
# Costs among the hyperparameters, in units that the tab's five digits can show.
PARAMS_COLUMN, CACHE_COLUMN = "params (M)", "cache (bytes/token)"
COLUMNS = ("attn", CACHE_COLUMN, PARAMS_COLUMN)  # which come first


def find_events(folder: str | Path, kind: str) -> list[Path]:
    """Return the event files of this kind at or below the folder."""
    return sorted(Path(folder).rglob(f"events.out.tfevents.*.{kind}.gptattn"))


def replace_events(
    folder: Path, kind: str, summaries: Iterable[tuple[Summary, int]], first: bool = False
) -> None:
    """Write summaries with their steps in place of the folder's event files of this kind.

    TensorBoard may read a run's files one after the other, by name, so the file comes `first`, or
    after all others. Raises DiskError if the disk refuses.
    """
    now, stamp = time.time(), 0 if first else time.time_ns()
    events = [Event(wall_time=now, file_version="brain.Event:2")]
    events += [Event(wall_time=now, step=step, summary=summary) for summary, step in summaries]
    file = folder / f"events.out.tfevents.{stamp}.{kind}.gptattn"
    data = [event.SerializeToString() for event in events]
    write_atomically(file, lambda target: [*map(RecordWriter(target).write, data)])
    for former in folder.glob(f"events.out.tfevents.*.{kind}.gptattn"):
        if former != file:
            former.unlink(missing_ok=True)


def declare_columns(
    hyperparameters: Mapping[str, object], metrics: Sequence[str], first: Collection[str] = COLUMNS
) -> Summary:
    """Return the columns of the HParams tab; the values say which of them are of text.

    The tab shows five hyperparameters, those in `first` before others and each by name, and five
    metrics. Of several runs it takes the columns of any one.
    """
    columns = [
        api_pb2.HParamInfo(
            name=name,
            type=api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64,
            differs=name in first,
        )
        for name, value in hyperparameters.items()
    ]
    names = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=metric)) for metric in metrics]
    experiment = api_pb2.Experiment(hparam_infos=columns, metric_infos=names)
    content = plugin_data_pb2.HParamsPluginData(experiment=experiment)
    tag, described = metadata.EXPERIMENT_TAG, metadata.create_summary_metadata(content)
    value = Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


def lay_out_bands(category: str, charts: Mapping[str, Sequence[str]]) -> Summary:
    """Return charts of the Custom Scalars tab: the tags of mean, low and high by title."""
    drawn = []
    for title, (mean, low, high) in charts.items():
        series = MarginChartContent.Series(value=mean, lower=low, upper=high)
        drawn.append(Chart(title=title, margin=MarginChartContent(series=[series])))
    layout = Layout(category=[Category(title=category, chart=drawn)])
    tensor = make_tensor_proto(layout.SerializeToString())
    value = {"metadata": create_summary_metadata(), "tensor": tensor}
    return Summary(value=[Summary.Value(tag=CONFIG_SUMMARY_TAG, **value)])


def show_image(tag: str, png: bytes) -> Summary:
    """Return the picture in this PNG."""
    image = Summary.Image(encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])
