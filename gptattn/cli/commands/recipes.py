"""Lists the recipes of released models whose cache fits, cheapest first.

The cache is that of one row in half precision; nothing is trained or measured. Other arguments are
settings of train.py, such as model=gpt2_small; the default is model=deep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gptattn.attention import MultiHeadLatentAttention, SoftmaxAttention
from gptattn.build.model import build_model
from gptattn.cli.arguments import Count, option, parse_own, run_script
from gptattn.errors import ConfigError
from gptattn.model.cost import count_cache, count_parameters
from gptattn.model.gpt import GPT
from gptattn.settings.compose import CONF, settings
from gptattn.settings.config import Positive

VOCABULARY = 256  # of bytes


@dataclass
class Arguments:
    """cache_bytes=1e6 context=32768"""

    cache_bytes: Positive = option("most bytes of the cache")
    context: Count = option("tokens in the cache", 32768)


def list_fitting(arguments: Sequence[str]) -> None:
    """Print the recipes that fit, then what the others need, or why they cannot be built.

    Raises ConfigError, which names the argument.
    """
    args, others = parse_own(Arguments, arguments)
    for one in others:
        if one.startswith("recipe="):
            raise ConfigError("recipe", "all are listed; leave it out")
    given = ["model=deep", f"model.context_length={args.context}", *others]
    build_recipe("llama3", *given)  # what is wrong in any recipe is an error
    caches, rows, left_out = dict[str, int](), dict[str, str](), list[str]()
    for name in list_recipes():
        try:
            model = build_recipe(name, *given)
        except ConfigError as error:
            left_out.append(f"{name}: {error.message}")
            continue
        caches[name] = count_cache(model)
        rows[name] = f"{count_parameters(model):>14,}  {', '.join(count_kinds(model))}"
    ranked = sorted(caches, key=lambda name: caches[name])
    width = max(map(len, rows))
    if caches[ranked[0]] <= args.cache_bytes:
        print(f"{'recipe':{width}}  {'cache bytes':>14}  {'parameters':>14}  layers")
    for name in ranked:
        if caches[name] <= args.cache_bytes:
            print(f"{name:{width}}  {caches[name]:>14,}  {rows[name]}")
    large = [f"{name} ({caches[name]:,})" for name in ranked if caches[name] > args.cache_bytes]
    print("\n".join([f"too large: {', '.join(large)}"] * bool(large) + left_out))


def list_recipes() -> list[str]:
    """Return the names of the files in conf/recipe."""
    return sorted(file.stem for file in (CONF / "recipe").glob("*.yaml"))


def build_recipe(name: str, *overrides: str, device: str = "meta") -> GPT:
    """Build the recipe's model, on the meta device without memory. Raises ConfigError."""
    with torch.device(device):
        return build_model(settings([f"recipe={name}", *overrides]), VOCABULARY)


def name_kinds(model: GPT) -> list[str]:
    """Return each layer's kind: full, window, no positions, latent or linear."""
    found = []
    for layer in (block.attention for block in model.layers()):
        if not isinstance(layer, SoftmaxAttention):
            found.append("linear")
        elif isinstance(layer, MultiHeadLatentAttention):
            found.append("latent")
        elif layer.window is not None:
            found.append("window")
        else:
            placed = layer.position is not None or model.input_position is not None
            found.append("full" if placed else "no positions")
    return found


def count_kinds(model: GPT) -> list[str]:
    """Return the number of layers of each kind: ["10 window", "2 full"]."""
    kinds = name_kinds(model)
    return [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]


main = partial(run_script, list_fitting, Arguments, __doc__)
