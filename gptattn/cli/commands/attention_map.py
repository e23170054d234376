"""Draws a run's attention weights.

It writes layer_00.png, ... and attention.html, and prints two means over the heads of each layer:
the entropy in nats, and the weight on the first token (sink); `uniform`: both for equal weights.
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
from gptattn.machine.disk import claim_folder, write_atomically
from gptattn.maps.head_statistics import measure_heads
from gptattn.maps.heatmap import pack_cells
from gptattn.maps.labels import label_tokens, make_visible, shorten
from gptattn.maps.layer_picture import draw_layer
from gptattn.maps.map_page import Layer, render_page
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_run
from gptattn.settings.config import Accelerator

MAX_TOKENS = 512  # of a prompt: GPT-2 small, with 144 heads, then has a page of 25 MB


@dataclass(frozen=True)
class Arguments:
    """prompt="To be" run=outputs/..."""

    run: Path = option("a run folder, or one made by gptattn-convert")
    prompt: str = option("the text to show attention for; prompt=- reads stdin")
    out: Path | None = option("where to write; default: RUN/attention; replaces earlier maps")
    device: Accelerator = option("cpu, gpu or auto", "auto")
    allow_targets: tuple[str, ...] = option(PACKAGES, ())


def run(arguments: Sequence[str]) -> None:
    """Write a picture of each layer and a page of all layers; print each layer's means.

    Raises a UserError for wrong arguments, NumericError for weights that are NaN or infinite.
    """
    args = parse(Arguments, arguments)
    device = resolve_device(args.device, "device")
    prompt = read_prompt(args.prompt)
    saved = load_run(args.run, args.allow_targets)
    model, name = saved.model, args.run.resolve().name
    tokens = saved.tokenizer.encode(prompt, "prompt").astype("int64")
    if not model.layers_with_maps():
        raise ConfigError(
            "run", f"attn={saved.cfg.variant} has no attention weights to show; use another run"
        )
    most = min(model.context_length, MAX_TOKENS)
    if len(tokens) > most:
        raise DataError("prompt", f"has {len(tokens)} tokens, more than {most}; shorten it")
    labels, ids = label_tokens(saved.tokenizer, tokens), torch.from_numpy(tokens)[None]

    out = args.out or RunFolder(args.run).maps
    claim_folder(out, "maps", "out", "layer_*.png", "attention.html")
    for old in out.glob("layer_*.png"):  # they can show another prompt
        if old.stem.removeprefix("layer_").isdecimal():
            old.unlink()
    layers: list[Layer] = []

    def write(file_name: str, content: bytes) -> None:
        write_atomically(out / file_name, lambda file: file.write(content))
        print(f"written: {out / file_name}", flush=True)

    for number, w_BHTS in model.to(device).each_attention(ids.to(device)):
        if not torch.isfinite(w_BHTS).all():
            raise NumericError(
                "run", f"{saved.source}: NaN or infinity in layer {number}; use another run"
            )
        entropy_H, sink_H = (value_H.tolist() for value_H in measure_heads(w_BHTS))
        w_HTS = w_BHTS[0].float().cpu().numpy()
        layers.append(Layer(number, entropy_H, sink_H, pack_cells(w_HTS)))
        titles = [
            f"head {head}: {e:.3f} nats, sink {s:.3f}"
            for head, (e, s) in enumerate(zip(entropy_H, sink_H, strict=True))
        ]
        title = f"{make_visible(name)}, layer {number}: {shorten(make_visible(prompt), 60)}"
        write(f"layer_{number:02d}.png", draw_layer(w_HTS, labels, titles, title))

    keys = torch.arange(2, len(labels) + 1, dtype=torch.float64)  # for each query but the first
    uniform = keys.log().mean().item(), keys.reciprocal().mean().item()
    page = render_page(
        layers,
        run=name,
        variant=saved.cfg.variant,
        prompt=prompt,
        labels=labels,
        uniform=uniform,
    )
    write("attention.html", page.encode())
    print(f"\n{'layer':>7}  {'entropy':>7}  {'sink':>5}")
    for layer in layers:
        entropy, sink = np.mean(layer.entropy_H), np.mean(layer.sink_H)
        print(f"{layer.number:>7}  {entropy:>7.3f}  {sink:>5.3f}")
    print(f"{'uniform':>7}  {uniform[0]:>7.3f}  {uniform[1]:>5.3f}")


main = partial(run_script, run, Arguments)
