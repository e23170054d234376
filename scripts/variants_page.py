"""Writes docs/variants.md: every choice of the menu with its cost, speed and attention map.

A choice is a file in conf/attn, conf/part, conf/position or conf/block. Its text on the page is the
comment at the top of the file: the definition, the paper and, from "Use" on, when to use it. Costs
are counted and speed is measured. The maps come from small models, which this script trains in
outputs/menu unless they are there already. The page's introduction is kept as it is.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from measuring.decode import layer_seconds
from measuring.menu import Stack, model_of, overrides_of
from measuring.tables import ratio, set_threads, timed

from gptattn.cli.arguments import Count, option, parse, run_script
from gptattn.data.tokenizer import encode_prompt
from gptattn.machine.disk import write_atomically
from gptattn.maps.labels import label_tokens
from gptattn.maps.layer_picture import draw_layer
from gptattn.model.cost import measure_cost
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_run
from gptattn.settings.compose import CONF, settings
from gptattn.training.run import train
from gptattn.training.speed import interleave

ROOT = CONF.parent
PAGE, PICTURES = ROOT / "docs" / "variants.md", ROOT / "docs" / "variants"
RUNS = ROOT / "outputs" / "menu"
TEXT = "def __init__(self, name): self.name = name"
BATCH, TRAIN_T, DECODE_S = 8, 1024, (1024, 8192)
SECTIONS = {
    "attn": ("Mechanisms", "`attn=NAME`", "mha"),
    "part": ("Parts", "`part=[NAME,...]`, measured with `attn=mha`", "mha"),
    "position": ("Positions", "`position=NAME`, measured with `attn=mha`", "learned"),
    "block": ("Blocks", "`block=NAME`, measured with `attn=mha`", "gpt2"),
}


@dataclass(frozen=True)
class Choice:
    """One file of the menu; `chosen` names it as `measuring.menu` does."""

    group: str
    name: str
    chosen: str
    definition: str
    paper: str
    use: str

    @property
    def key(self) -> str:
        """A unique name."""
        return f"{self.group}_{self.name}"


def choices() -> Iterator[Choice]:
    """Yield every choice of the menu whose file says when to use it."""
    for group in SECTIONS:
        for file in sorted((CONF / group).glob("*.yaml")):
            by_group = {"attn": file.stem, "part": f"mha+{file.stem}"}
            texts = header(file)
            if texts is not None:
                chosen = by_group.get(group, f"mha:{group}={file.stem}")
                yield Choice(group, file.stem, chosen, *texts)


def header(file: Path) -> tuple[str, str, str] | None:
    """Return the definition, the paper and when to use it, from the comment at the file's top.

    The paper begins at the first line with a year, the last text at "Use". None if one is missing.
    """
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines += [line.lstrip("# ")] if "@package" not in line else []
    paper = next((i for i, line in enumerate(lines) if re.search(r"\b(19|20)\d\d\b", line)), 0)
    use = next((i for i, line in enumerate(lines) if line.startswith("Use ")), 0)
    if not 0 < paper < use:
        return None
    return " ".join(lines[:paper]), " ".join(lines[paper:use]), " ".join(lines[use:])


def stack_of(choice: Choice, context: int) -> Stack:
    """Return two layers of GPT-2 small with this choice: whole blocks for a block, else attentions.

    Two, because some choices share between layers; two for all, so that ratios are fair.
    """
    sizes = (f"model.context_length={context}", "model.num_layers=2")
    blocks = model_of(choice.chosen, *sizes).layers()
    return Stack(blocks if choice.group == "block" else [block.attention for block in blocks])


def training_seconds(choice: Choice) -> float:
    """Return the seconds per layer of a forward and backward pass on (1, TRAIN_T, 768)."""
    stack, x = stack_of(choice, TRAIN_T), torch.randn(1, TRAIN_T, 768, requires_grad=True)
    return timed(lambda: stack(x).sum().backward(), warm_up=1, steps=3) / len(stack)


def decoding_seconds(choice: Choice, S: int) -> float:
    """Return the seconds per layer to decode one token in BATCH rows, after S tokens."""
    return layer_seconds(stack_of(choice, S).eval(), BATCH, S)


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (ms, ratio to its section's base) by choice: training, then each decoding."""
    results: dict[str, list[tuple[float, float]]] = {}
    for group, (_, _, base) in SECTIONS.items():
        section = {one.name: one for one in choices() if one.group in (group, "attn")}
        section = {n: one for n, one in section.items() if one.group == group or n == base}
        timings = [
            {name: partial(training_seconds, one) for name, one in section.items()},
            *(
                {name: partial(decoding_seconds, one, S) for name, one in section.items()}
                for S in DECODE_S
            ),
        ]
        for timing in timings:
            seconds = interleave(timing, rounds)
            for name, values in seconds.items():
                if section[name].group != group:
                    continue  # the base of another section, timed here only for the ratios
                share = ratio(values, seconds[base])
                results.setdefault(section[name].key, []).append((1e3 * median(values), share))
    return results


def draw(choice: Choice, steps: int) -> Path | None:
    """Draw the last layer's attention weights on TEXT in a small model, trained if need be.

    Returns the picture's path, or None if the mechanism has no attention weights.
    """
    folder = RUNS / choice.key
    if not RunFolder(folder).done:
        print(f"training {choice.key}")
        overrides = [*overrides_of(choice.chosen), f"budget.steps={steps}", "trainer=cpu"]
        train(settings(overrides), str(folder))
    run = load_run(folder)
    layers = run.model.layers_with_maps()
    if not layers:
        return None
    ids = encode_prompt(run.tokenizer, TEXT)
    w_HTS = run.model.attention_weights(torch.tensor(ids)[None].long())[-1][0]
    labels = label_tokens(run.tokenizer, ids)
    titles = [f"head {h}" for h in range(len(w_HTS))]
    png = draw_layer(w_HTS.double().numpy(), labels, titles, f"{choice.name}, layer {layers[-1]}")
    path = PICTURES / f"{choice.key}.png"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda file: file.write(png))
    return path


def page(pictures: dict[str, Path | None], speed: dict[str, list[tuple[float, float]]]) -> str:
    """Return the page."""
    text = [PAGE.read_text(encoding="utf-8").partition("\n\n## ")[0]]
    for group, (title, how, base) in SECTIONS.items():
        section = [one for one in choices() if one.group == group]
        text += [f"## {title}", how, "\n".join(table(section, speed, base))]
        for one in section:
            text += [f"### {one.name}", f"{one.definition} {one.use}", f"Source: {one.paper}"]
            picture = pictures[one.key]
            if picture is not None:
                text.append(
                    f"![attention weights of {one.name}]({picture.relative_to(PAGE.parent)})"
                )
    return "\n\n".join(text) + "\n"


def table(
    section: Sequence[Choice], speed: dict[str, list[tuple[float, float]]], base: str
) -> Iterator[str]:
    """Yield the lines of a section's table."""
    yield (
        "| name | parameters | per layer's attention | cache bytes | MFLOPs | training ms "
        f"| x {base} | decoding ms, 1k | x {base} | decoding ms, 8k | x {base} |"
    )
    yield "| --- |" + " ---: |" * 10
    for one in section:
        times = " | ".join(f"{ms:.2f} | {share:.2f}" for ms, share in speed[one.key])
        yield f"{row(one)} {times} |"


def row(choice: Choice) -> str:
    """Return the start of a choice's row: its name, and its costs, counted on the meta device."""
    with torch.device("meta"):
        model = model_of(choice.chosen, "model.vocab_size=50257").to(torch.bfloat16)
        cost = measure_cost(model)
    assert cost.kv_bytes_per_token is not None  # every mechanism of the menu has a cache
    layers = len(model.layers())
    return (
        f"| {choice.name} | {cost.params:,} | {cost.params_attention / layers:,.0f} "
        f"| {cost.kv_bytes_per_token / layers:,.0f} | {cost.flops_per_token / 1e6:,.1f} |"
    )


@dataclass(frozen=True)
class Arguments:
    """rounds=5"""

    rounds: Count = option("how often each choice is timed, interleaved", 5)
    steps: Count = option("training steps of the models whose maps are drawn", 600)
    threads: Count = option("CPU threads", 2)


def run(arguments: Sequence[str]) -> None:
    """Train, measure, and write the page."""
    args = parse(Arguments, arguments)
    set_threads(args.threads)
    pictures = {one.key: draw(one, args.steps) for one in choices()}
    text = page(pictures, measure(args.rounds))
    write_atomically(PAGE, lambda file: file.write(text.encode()))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    sys.exit(run_script(run, Arguments))
