"""Makes one self-contained HTML page of all layers and heads, with every value escaped."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from gptattn.machine.template import fill_template
from gptattn.maps.heatmap import map_to_viridis
from gptattn.maps.labels import make_visible


@dataclass(frozen=True)
class Layer:
    """A layer on the page: its number, figures per head, and weights from `pack_cells`."""

    number: int
    entropy_H: list[float]  # nats; NaN for one token
    sink_H: list[float]  # mean weight on the first token
    cells_HN: NDArray[np.uint8]


def render_page(
    layers: Sequence[Layer],
    *,
    run: str,
    variant: str,
    prompt: str,
    labels: Sequence[str],
    uniform: tuple[float, float],
) -> str:
    """Return the page's HTML.

    `labels` has one per token; `uniform` is the entropy and sink of uniform attention over them.
    """
    script = files("gptattn.maps").joinpath("page.js").read_text(encoding="utf-8")
    return fill_template(
        "gptattn.maps",
        "page.html.j2",
        run=make_visible(run),
        variant=variant,
        # Keep line breaks, so that the prompt reads as it was written.
        prompt=make_visible(prompt).replace("␣", " ").replace("⏎", "⏎\n"),
        tokens=len(labels),
        uniform=uniform,
        layers=layers,
        script=Markup(script),
        data={
            "labels": list(labels),
            "colours": _encode(map_to_viridis(np.arange(256) / 255)),
            "layers": [
                {"number": layer.number, "heads": [_encode(cells_N) for cells_N in layer.cells_HN]}
                for layer in layers
            ],
        },
    )


def _encode(values: NDArray[np.uint8]) -> str:
    return base64.b64encode(values.tobytes()).decode()
