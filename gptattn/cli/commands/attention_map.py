"""Draws a run's attention weights.

It writes layer_00.png, ... and attention.html, and prints each layer's means over its heads:
entropy, in nats, and the weight on the first token (sink).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gptattn.cli.arguments import PACKAGES, option, parse, run_script
from gptattn.decode.prompt import read_prompt
from gptattn.errors import ConfigError, DataError, NumericError
from gptattn.machine.device import resolve_device
from gptattn.machine.disk import disk_errors, write_atomically
from gptattn.maps.head_statistics import even_weights, measure_heads
from gptattn.maps.heatmap import choose_cell_side, pack_cells
from gptattn.maps.labels import label_tokens, make_visible, shorten
from gptattn.maps.layer_picture import draw_layer
from gptattn.maps.map_page import Layer, render_page
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import SavedRun, load_run
from gptattn.settings.config import Accelerator


@dataclass(frozen=True)
class Arguments:
    """prompt="To be" run=outputs/..."""

    run: Path = option("a run folder, or one that convert made")
    prompt: str = option("the text to compute attention on; prompt=- reads stdin")
    layer: int | None = option("only this layer, counted from 0; default: all")
    out: Path | None = option("default: RUN/attention; earlier maps are replaced")
    device: Accelerator = option("cpu, gpu or auto", "auto")
    allow_targets: tuple[str, ...] = option(PACKAGES, ())


def choose_layers(saved: SavedRun, layer: int | None) -> list[int]:
    """Return the layers to draw: `layer`, or all with attention weights. Raises ConfigError."""
    with_maps = saved.model.layers_with_maps()
    if not with_maps:
        raise ConfigError(
            "run", f"attn={saved.cfg.variant} has no attention weights to show; give another run"
        )
    if layer not in (None, *with_maps):
        raise ConfigError("layer", f"{layer} has no attention weights; give one of {with_maps}")
    return with_maps if layer is None else [layer]


def run(arguments: Sequence[str]) -> None:
    """Write a picture of each layer and a page over all, and print each layer's means.

    Raises a UserError for wrong arguments, NumericError for weights that are NaN or infinite.
    """
    args = parse(Arguments, arguments)
    device = resolve_device(args.device, "device")
    prompt = read_prompt(args.prompt)
    saved = load_run(args.run, args.allow_targets)
    model, name = saved.model, args.run.resolve().name
    tokens = saved.tokenizer.encode(prompt, "prompt").astype("int64")
    if len(tokens) > model.context_length:
        most = f"more than the context of {model.context_length}; shorten it"
        raise DataError("prompt", f"has {len(tokens)} tokens, {most}")
    labels, ids = label_tokens(saved.tokenizer, tokens, prompt), torch.from_numpy(tokens)[None]
    chosen = choose_layers(saved, args.layer)
    heads = {layer: w_BHTS.shape[1] for layer, w_BHTS in model.each_attention(ids[:, :1])}
    side = choose_cell_side(len(labels), sum(heads[layer] for layer in chosen))

    out = args.out or RunFolder(args.run).maps
    with disk_errors(out, "out"):
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("layer_*.png"):  # they may show another prompt
            old.unlink()
    layers: list[Layer] = []

    def write(file_name: str, content: bytes) -> None:
        write_atomically(out / file_name, lambda file: file.write(content))
        print(f"written: {out / file_name}", flush=True)

    for number, w_BHTS in model.to(device).each_attention(ids.to(device)):
        if number not in chosen:
            continue
        if not torch.isfinite(w_BHTS).all():
            raise NumericError(
                "run", f"{saved.source}: NaN or infinity in layer {number}; give another run"
            )
        entropy_H, sink_H = (value_H.tolist() for value_H in measure_heads(w_BHTS))
        w_HTS = w_BHTS[0].float().cpu().numpy()
        layers.append(Layer(number, entropy_H, sink_H, pack_cells(w_HTS, side)))
        titles = [
            f"head {head}: {e:.3f} nats, sink {s:.3f}"
            for head, (e, s) in enumerate(zip(entropy_H, sink_H, strict=True))
        ]
        title = f"{make_visible(name)}, layer {number}: {shorten(make_visible(prompt), 60)}"
        write(f"layer_{number:02d}.png", draw_layer(w_HTS, labels, titles, title))

    entropy_1, sink_1 = measure_heads(even_weights(len(labels)))
    even = entropy_1.item(), sink_1.item()
    page = render_page(
        layers,
        side,
        run=name,
        variant=saved.cfg.variant,
        prompt=prompt,
        labels=labels,
        even=even,
    )
    write("attention.html", page.encode())
    print(f"\n{'layer':>5}  {'entropy':>7}  {'sink':>5}")
    for layer in layers:
        entropy, sink = np.mean(layer.entropy_H), np.mean(layer.sink_H)
        print(f"{layer.number:>5}  {entropy:>7.3f}  {sink:>5.3f}")
    print(f"{'even':>5}  {even[0]:>7.3f}  {even[1]:>5.3f}")


main = partial(run_script, run, Arguments, __doc__)
