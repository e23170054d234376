"""Draws a run's attention weights: `gptattn-attention-map run=outputs/... prompt=TEXT`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gptattn.attention.head_statistics import entropy, even_weights, sink_mass
from gptattn.cli.arguments import NO_NAMES, Names, parse
from gptattn.cli.script import run_script
from gptattn.decode.prompt import read_prompt
from gptattn.errors import ConfigError, DataError, DiskError, NumericError
from gptattn.machine.device import resolve_device
from gptattn.machine.disk import write_atomically
from gptattn.maps.cells import packed, tokens_per_cell
from gptattn.maps.labels import short, token_labels, visible
from gptattn.maps.layer_picture import layer_png
from gptattn.maps.map_page import Layer, PageHeader, page_text
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import SavedRun, load_run
from gptattn.settings.config import Accelerator

HELP = """\
COMMAND run=outputs/... prompt="To be"

  run=FOLDER        a run folder, or one that convert made
  prompt=TEXT       the text to compute attention on; - reads stdin
  prompt_file=FILE  read the prompt from a file
  layer=N           only this layer, counted from 0; default: all
  out=FOLDER        default: RUN/attention; earlier maps are replaced
  device=auto       cpu, gpu or auto
  allow_targets=PACKAGE
                    packages besides gptattn that the run may name (a,b)

It writes layer_00.png, ... and attention.html, and prints each layer's means
over its heads: entropy, in nats, and the weight on the first token (sink).
"""


@dataclass(frozen=True)
class Arguments:
    """The command's arguments; HELP describes them."""

    run: Path
    prompt: str | None = None
    prompt_file: Path | None = None
    layer: int | None = None
    out: Path | None = None
    device: Accelerator = "auto"
    allow_targets: Names = NO_NAMES


def token_ids(saved: SavedRun, prompt: str) -> Tensor:
    """Return the prompt's ids [1, T]. Raises DataError if it is longer than the context."""
    ids = saved.tokenizer.encode(prompt, "prompt").astype("int64")
    context = saved.model.context_length
    if len(ids) > context:
        raise DataError(
            "prompt", f"has {len(ids)} tokens, more than the context of {context}; shorten it"
        )
    return torch.from_numpy(ids)[None]


def chosen_layers(saved: SavedRun, layer: int | None) -> list[int]:
    """Return the layers to draw: `layer`, or all with attention weights. Raises ConfigError."""
    count, with_maps = len(saved.model.layers()), saved.model.layers_with_maps()
    if not with_maps:
        raise ConfigError(
            "run", f"attn={saved.cfg.variant} has no attention weights to show; give another run"
        )
    if layer is None:
        return with_maps
    if not 0 <= layer < count:
        raise ConfigError(
            "layer", f"{layer} does not exist; give 0 to {count - 1}, or leave it out"
        )
    if layer not in with_maps:
        raise ConfigError("layer", f"{layer} has no attention weights; give one of {with_maps}")
    return [layer]


def count_heads(saved: SavedRun, ids: Tensor, layers: list[int]) -> int:
    """Return the number of heads of these layers together; it may differ between layers."""
    heads: dict[int, int] = {}
    saved.model.each_attention(ids[:, :1], lambda i, w_BHTS: heads.update({i: w_BHTS.shape[1]}))
    return sum(heads[layer] for layer in layers)


class Writer:
    """Writes a picture per layer as its weights arrive, and at the end the page over all layers.

    Raises DiskError if the output folder cannot be made.
    """

    def __init__(self, saved: SavedRun, prompt: str, ids: Tensor, args: Arguments) -> None:
        self.saved, self.prompt = saved, prompt
        self.name = args.run.resolve().name
        self.out = args.out or RunFolder(args.run).maps
        self.labels = token_labels(saved.tokenizer, ids[0].numpy(), prompt)
        self.chosen = chosen_layers(saved, args.layer)
        self.side = tokens_per_cell(len(self.labels), count_heads(saved, ids, self.chosen))
        self.layers: list[Layer] = []
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for old in self.out.glob("layer_*.png"):  # they may show another prompt
                old.unlink()
        except OSError as error:
            raise DiskError("out", f"{self.out}: {error.strerror}; give another out=") from None

    def look(self, number: int, w_BHTS: Tensor) -> None:
        """Write the picture of layer `number`, B = 1. Raises NumericError for NaN or infinity."""
        if number not in self.chosen:
            return
        if not torch.isfinite(w_BHTS).all():
            raise NumericError(
                "run", f"{self.saved.source}: NaN or infinity in layer {number}; give another run"
            )
        entropy_H, sink_H = entropy(w_BHTS).tolist(), sink_mass(w_BHTS).tolist()
        w_HTS = w_BHTS[0].float().cpu().numpy()
        self.layers.append(Layer(number, entropy_H, sink_H, packed(w_HTS, self.side)))
        titles = [
            f"head {head}: {figure(e)} nats, sink {figure(s)}"
            for head, (e, s) in enumerate(zip(entropy_H, sink_H, strict=True))
        ]
        title = f"{visible(self.name)}, layer {number}: {short(visible(self.prompt), 60)}"
        self.write(f"layer_{number:02d}.png", layer_png(w_HTS, self.labels, titles, title))

    def page(self) -> None:
        """Write attention.html and print each layer's mean entropy (nats) and sink mass."""
        even = even_weights(len(self.labels))
        shown = PageHeader(
            run=self.name,
            variant=self.saved.cfg.variant,
            prompt=self.prompt,
            labels=self.labels,
            even_entropy=entropy(even).item(),
            even_sink=sink_mass(even).item(),
        )
        self.write("attention.html", page_text(shown, self.layers, self.side).encode())
        print(f"\n{'layer':>5}  {'entropy':>7}  {'sink':>5}")
        for layer in self.layers:
            means = figure(np.mean(layer.entropy_H)), figure(np.mean(layer.sink_H))
            print(f"{layer.number:>5}  {means[0]:>7}  {means[1]:>5}")
        print(f"{'even':>5}  {figure(shown.even_entropy):>7}  {figure(shown.even_sink):>5}")

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the output folder atomically and print its path."""
        path = self.out / name
        write_atomically(path, lambda file: file.write(content))
        print(f"written: {path}", flush=True)


def figure(value: float | np.floating) -> str:
    """Format with three decimals; a dash for NaN and infinity."""
    return f"{value:.3f}" if np.isfinite(value) else "–"  # noqa: RUF001


def run(args: Arguments) -> None:
    """Write the maps of the run on the prompt. Raises a UserError for wrong arguments."""
    device = resolve_device(args.device, "device")
    prompt = read_prompt(args.prompt, args.prompt_file)
    saved = load_run(args.run, args.allow_targets)
    ids = token_ids(saved, prompt)
    writer = Writer(saved, prompt, ids, args)
    saved.model.to(device).each_attention(ids.to(device), writer.look)
    writer.page()


def main() -> int:
    """Run `gptattn-attention-map`; return the exit code."""
    return run_script(HELP, lambda arguments: run(parse(Arguments, arguments)))
