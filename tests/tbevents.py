"""Read TensorBoard's event files as TensorBoard does."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray


def read_events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


def read_charts(events: EventAccumulator) -> list[Category]:
    """The categories of the Custom Scalars tab."""
    (event,) = events.Tensors("custom_scalars__config__")
    return list(Layout.FromString(make_ndarray(event.tensor_proto).item()).category)


def read_hparams(events: EventAccumulator, *kinds: str) -> list[Any]:
    """What the HParams tab reads: of `experiment`, `session_start_info`, `session_end_info`."""
    data = [events.summary_metadata[f"_hparams_/{kind}"].plugin_data.content for kind in kinds]
    return [
        getattr(HParamsPluginData.FromString(content), kind)
        for kind, content in zip(kinds, data, strict=True)
    ]


def read_line(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(one.step, make_ndarray(one.tensor_proto).item()) for one in events.Tensors(tag)]
