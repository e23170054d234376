"""Writes the table and the picture of docs/recipes.md: the cost of each recipe relative to llama3.

This takes five to ten minutes. The release comes from the line `# Release: NAME, YEAR.` at the top
of a recipe's file. Parameters and caches are counted, and speed is measured, at GPT-2 small's size.
The text around the table is kept.
"""

import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from textwrap import fill
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from measuring.decode import layer_seconds
from measuring.menu import Stack
from measuring.tables import ratio, set_threads, spread, timed

from gptattn.attention import GatedShortConvolution, MultiHeadLatentAttention, SoftmaxAttention
from gptattn.build.model import build_model
from gptattn.cli.arguments import Count, option, parse, run_script
from gptattn.compare.plots import COLOURS, STYLE
from gptattn.machine.device import device_name
from gptattn.machine.disk import write_atomically
from gptattn.model.cost import count_cache, count_parameters
from gptattn.model.gpt import GPT
from gptattn.settings.compose import CONF, settings
from gptattn.training.speed import interleave

DOCS = CONF.parent / "docs"
PAGE, BASE = DOCS / "recipes.md", "llama3"
TRAIN_T, DECODE_S, CACHE_S = 512, 1024, (8192, 32768)
BLUE, ORANGE, GREEN, RED, PINK, SKY = COLOURS
KINDS = {
    "full": BLUE,
    "window": SKY,
    "no positions": ORANGE,
    "latent": PINK,
    "linear": GREEN,
    "convolution": RED,
}
TABLE = re.compile(r"(<!-- table -->\n).*(<!-- end of the table -->)", re.DOTALL)
HEADINGS = (
    "| recipe | release | year | layers | parameters | cache at 8,192 | cache at 32,768 | training "
    "| decoding |\n| --- | --- | --- | --- |" + " ---: |" * 5
)
VOCABULARY = 256  # bytes
Seconds = Mapping[str, list[float]]  # recipe -> seconds in each round


def build(name: str, context: int = DECODE_S, device: str = "meta") -> GPT:
    """Build the recipe at GPT-2 small's size; the meta device takes no memory."""
    overrides = [f"recipe={name}", "model=gpt2_small", f"model.context_length={context}"]
    with torch.device(device):
        return build_model(settings(overrides), VOCABULARY)


def name_kinds(model: GPT) -> list[str]:
    """Return each layer's kind: full, window, no positions, latent, linear or convolution."""
    kinds = []
    for layer in (block.attention for block in model.layers()):
        if isinstance(layer, GatedShortConvolution):
            kinds.append("convolution")
        elif not isinstance(layer, SoftmaxAttention):
            kinds.append("linear")
        elif isinstance(layer, MultiHeadLatentAttention):
            kinds.append("latent")
        elif layer.window is not None:
            kinds.append("window")
        else:
            has_positions = layer.position is not None or model.input_position is not None
            kinds.append("full" if has_positions else "no positions")
    return kinds


def count_kinds(model: GPT) -> list[str]:
    """Return the number of layers of each kind: ["10 window", "2 full"]."""
    kinds = name_kinds(model)
    return [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]


def release(name: str) -> tuple[str, str]:
    """Return the year and the name of the released model."""
    text = (CONF / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")
    line = re.search(r"^# Release: (.+), (\d{4})\.$", text, re.MULTILINE)
    if line is None:
        raise SystemExit(f"error: conf/recipe/{name}.yaml has no line `# Release: NAME, YEAR.`")
    return line[2], line[1]


def oldest_first() -> list[str]:
    """Return the names of all recipes, by year."""
    names = [file.stem for file in (CONF / "recipe").glob("*.yaml")]
    return sorted(names, key=lambda name: (release(name)[0], name))


@cache
def costs(name: str) -> list[float]:
    """Return the parameters, and the cache bytes at each length in CACHE_S of one model."""
    longest = build(name, max(CACHE_S))
    return [count_parameters(build(name)), *(count_cache(longest, S) for S in CACHE_S)]


def row(name: str) -> str:
    """Return the start of a recipe's row: everything but the measured speeds."""
    year, title = release(name)
    shares = [f"{a / b:.2f}" for a, b in zip(costs(name), costs(BASE), strict=True)]
    layers = ", ".join(count_kinds(build(name)))
    return f"| {name} | {title} | {year} | {layers} | {' | '.join(shares)} |"


def measure(rounds: int) -> tuple[Seconds, Seconds]:
    """Return the seconds per training step and per decoded token."""
    models = {name: build(name, device="cpu") for name in oldest_first()}
    ids = torch.randint(VOCABULARY, (1, TRAIN_T))

    def train(model: GPT) -> float:
        model.zero_grad()
        return timed(lambda: model.loss(ids, ids).backward(), warm_up=0, steps=1)

    def decode(model: GPT) -> float:
        model.zero_grad()
        stack = Stack(model.layers())
        return layer_seconds(stack, 1, DECODE_S) * len(stack)

    timed_steps = {
        (step, name): partial(step, model)
        for name, model in models.items()
        for step in (train, decode)
    }
    interleave(timed_steps, 1)  # to warm up
    seconds = interleave(timed_steps, rounds)
    training = {name: seconds[train, name] for name in models}
    return training, {name: seconds[decode, name] for name in models}


def table(training: Seconds, decoding: Seconds, rounds: int) -> str:
    """Return the table, and below it the absolute figures of BASE."""
    lines = [HEADINGS]
    for name in oldest_first():
        speeds = [
            f"{ratio(seconds[BASE], seconds[name]):.2f} ± {spread(seconds[name]):.0%} |"
            for seconds in (training, decoding)
        ]
        lines.append(f"{row(name)} {' '.join(speeds)}")
    params, *caches = costs(BASE)
    sizes = zip(caches, CACHE_S, strict=True)
    cached = " and ".join(f"{size / 1e6:,.0f} MB at {S:,} tokens" for size, S in sizes)
    below = (
        f"`{BASE}` has {params / 1e6:.1f} million parameters. It caches {cached}, trains "
        f"{TRAIN_T / median(training[BASE]):,.0f} tokens/s and decodes "
        f"{1 / median(decoding[BASE]):,.1f} tokens/s: medians of {rounds} rounds in float32 on "
        f"{torch.get_num_threads()} threads (processor: {device_name(torch.device('cpu'))})."
    )
    return "\n".join([*lines, "", fill(below, 120), ""])


def draw(strips: Mapping[str, list[str]]) -> bytes:
    """Return a picture of each recipe's layers, the first on the left, coloured by kind."""
    style: dict[Any, Any] = {"figure.facecolor": "white", "axes.grid": False}
    with rc_context(STYLE | style):
        figure = Figure((6.4, 0.7 + 0.21 * len(strips)), layout="constrained")
        axes = figure.add_subplot()
        for y, strip in enumerate(strips.values()):
            axes.barh(y, 0.93, 0.8, [*range(len(strip))], color=[KINDS[kind] for kind in strip])
        axes.set_yticks(range(len(strips)), [f"{n}, {release(n)[0]}" for n in strips])
        axes.set_xticks([])
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        patches = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(KINDS))
        out = io.BytesIO()
        figure.savefig(out, dpi=150, metadata={"Software": None})  # its version would differ
    return out.getvalue()


@dataclass(frozen=True)
class Arguments:
    """rounds=5"""

    rounds: Count = option("how often each recipe is timed, interleaved", 5)
    threads: Count = option("CPU threads", 2)


def run(arguments: Sequence[str]) -> None:
    """Measure, and write the table and the picture."""
    args = parse(Arguments, arguments)
    set_threads(args.threads)
    text = table(*measure(args.rounds), args.rounds)
    page = TABLE.sub(lambda marks: marks[1] + text + marks[2], PAGE.read_text(encoding="utf-8"))
    write_atomically(PAGE, lambda file: file.write(page.encode()))
    strips = {name: name_kinds(build(name)) for name in oldest_first()}
    picture = draw(strips)
    write_atomically(DOCS / "recipes.png", lambda file: file.write(picture))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    sys.exit(run_script(run, Arguments))
