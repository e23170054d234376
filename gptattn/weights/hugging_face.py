"""What the kinds of Hugging Face checkpoint folders share: config.json, weights, and refusals.

Such a folder may come from anywhere: its sizes are checked against the headers of its files before
any memory is asked for.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gptattn.attention import Attention
from gptattn.attention.base import HasHeads, HeadWeights, heads_of, refuse_loss
from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.machine.disk import write_atomically
from gptattn.model.gpt import GPT
from gptattn.runs.tensor_file import read_tensors, write_tensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # of weights in several files
# What is fetched from the hub, as patterns.
FILES = (CONFIG, WEIGHTS, INDEX, "model-*-of-*.safetensors")
TRIAL_TOKENS = 1024  # of a comparison by numbers, whose scores are T x T

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Family:
    """One kind of model that can be read and written, such as GPT-2."""

    name: str  # `model_type` in config.json, and the word after from= of convert.py
    choices: dict[str, str]  # the config choices that fit
    overrides: Callable[[Path], list[str]]  # the settings of the model in a folder
    load: Callable[[Path], GPT]  # in eval mode, on the CPU
    write: Callable[[Path, GPT], None]
    has_tokenizer: Callable[[Path], bool]  # whether the folder holds one that tokenizer=gpt2 reads


@dataclass(frozen=True)
class Layout:
    """The tensors in the files of one model, by the family's names."""

    shapes: Callable[[], dict[str, list[int]]]  # of all tensors; called once the layers are counted
    layers: str  # what the name of a layer's tensor begins with, before the layer's number
    num_layers: int
    prefix: str  # of the names in some files
    skipped: tuple[str, ...]  # ends of names that are not read


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a config.json, as Hugging Face's do and run folders do not."""
    return (folder / CONFIG).is_file()


@contextmanager
def _one_line(file: Path) -> Iterator[None]:
    """Turn whatever the content of a JSON file can raise into a CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(
            "path",
            f"{file.parent} has no {file.name}; give a Hugging Face folder, or hf:owner/name",
        ) from None
    except KeyError as error:
        raise CheckpointError("path", f"{file} has no {error}: not a config we know") from None
    # int(Infinity) raises OverflowError, and deeply nested brackets raise RecursionError.
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        raise CheckpointError("path", f"{file} cannot be used ({str(e)[:200]})") from None


def _json(file: Path) -> Any:
    return json.loads(file.read_bytes().decode("utf-8"))


def read_config(folder: Path, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """Return `parse(content)` for the content of config.json.

    Raises CheckpointError if the file is missing or damaged, or if `parse` raises a ValueError or
    what missing keys and wrong types raise.
    """
    file = folder / CONFIG
    with _one_line(file):
        return parse(_json(file))


def check_accepted(node: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a key with another value than those; a missing one has the first."""
    for name, allowed in accepted.items():
        if node.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{name} is {node[name]!r:.60}, but must be {allowed[0]!r}")


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise ValueError for a size that no model has."""
    for name, size in sizes.items():
        if not 0 < size < 2**31:
            raise ValueError(f"{name} is {size}")


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as they are given on the command line."""
    return [f"{name}={str(value).lower()}" for name, value in settings.items()]


@torch.no_grad()
def load(
    folder: Path,
    build: Callable[[], GPT],
    layout: Layout,
    fill: Callable[[GPT, dict[str, Tensor]], None],
) -> GPT:
    """Return the model of `build`, in eval mode, after `fill(model, tensors of the files)`.

    Raises CheckpointError if a file is missing or damaged, if its tensors are not those of the
    layout, or if the model cannot be built; NumericError for a weight that is not
    finite.
    """
    found = _checked(folder, layout)
    try:
        model = build()
    except ValueError as error:
        raise CheckpointError("path", f"{folder / CONFIG}: {error}") from None
    tensors: dict[str, Tensor] = {}
    for file, names in found.items():
        for name, tensor in read_tensors(file, names).items():
            if not torch.isfinite(tensor).all():
                raise NumericError("path", f"{file}: {name} is not finite; use other weights")
            tensors[name.removeprefix(layout.prefix)] = tensor
    fill(model, tensors)
    return model.eval()


def _checked(folder: Path, layout: Layout) -> dict[Path, list[str]]:
    """Return the files of weights and the names to read from each; values are not read.

    Raises CheckpointError if names, kinds or shapes are not those of the layout.
    """
    shapes: dict[str, list[int]] = {}
    found: dict[Path, list[str]] = {}
    files = _files(folder)
    for file in files:
        found[file] = []
        try:
            found_here = read_tensors(file)
        except CheckpointError as error:
            raise CheckpointError("path", error.message) from None
        for name, tensor in found_here.items():
            plain = name.removeprefix(layout.prefix)
            if f".{plain}".endswith(layout.skipped):
                continue
            if not tensor.is_floating_point():
                raise CheckpointError(
                    "path", f"{file}: {name[:80]} is {tensor.dtype}, not floating-point"
                )
            if plain in shapes:
                raise CheckpointError("path", f"{file} has a second {name[:100]!r}")
            shapes[plain] = list(tensor.shape)
            found[file].append(name)
    _check_shapes(files[0] if len(files) == 1 else folder / INDEX, shapes, layout)
    return found


def _check_shapes(where: Path, shapes: Mapping[str, list[int]], layout: Layout) -> None:
    pattern = re.compile(rf"{re.escape(layout.layers)}(\d+)\.", re.ASCII)
    layers = {match[1] for name in shapes if (match := pattern.match(name))}
    if len(layers) < layout.num_layers:
        raise CheckpointError(
            "path",
            f"{where} lacks {layout.layers}{len(layers)}: {CONFIG} has {layout.num_layers} layers",
        )
    expected = layout.shapes()
    for name in [*expected, *shapes]:
        if name not in shapes:
            raise CheckpointError("path", f"{where} lacks {name}")
        if name not in expected:
            raise CheckpointError("path", f"{where} has an unknown {name[:100]!r}")
        if shapes[name] != expected[name]:
            raise CheckpointError(
                "path", f"{where}: {name} is {shapes[name]}, not {expected[name]}"
            )


def _files(folder: Path) -> list[Path]:
    """Return the files of weights: one, or those that the index names.

    Raises CheckpointError for an index that cannot be used.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.is_file():
        return [folder / WEIGHTS]
    with _one_line(index):
        names = {str(name) for name in _json(index)["weight_map"].values()}
        for name in names:
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"{name[:60]!r} is not the name of a file beside it")
        if not names:
            raise ValueError("it names no file")
    return [folder / name for name in sorted(names)]


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a folder that transformers opens. Raises DiskError if the disk refuses."""
    text = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, weights, {})
    write_atomically(folder / CONFIG, lambda file: file.write(text.encode()))


def exported(
    layer: int,
    attention: Attention,
    family: str,
    plain: Callable[[Attention, HeadWeights], HasHeads],
) -> HeadWeights:
    """Return the head weights of a layer, if the family's attention has the same outputs from them.

    `plain(attention, weights)` builds the family's attention at these sizes; it raises ValueError
    if that cannot have such weights. Raises ConfigError then, and if the layer has no heads or
    other parameters, or gives other outputs.
    """
    try:
        weights = heads_of(attention).export_heads()
        refuse_loss(attention, set())
        like = plain(attention, weights)
        like.load_heads(weights)
    except ValueError as error:
        raise ConfigError("to", f"layer {layer}: {error}") from None
    assert isinstance(like, Attention)
    if not _attend_alike(attention, like.to(weights.q_HDE)):
        raise ConfigError(
            "to",
            f"layer {layer}: the same heads give other outputs in {family}, whose scores have no "
            "scale but head_dim ** -0.5, no window and no soft cap",
        )
    return weights


@torch.no_grad()
def _attend_alike(attention: Attention, plain: Attention) -> bool:
    """Whether both give the same outputs.

    Asked of numbers, as a variant may change scores in any way. The inputs are ten times what a
    norm gives, so that a soft cap takes hold.
    """
    most = attention.context_length
    T, w = min(most, TRIAL_TOKENS), next(plain.parameters())
    x_BTE = torch.randn(1, T, attention.d_in, generator=torch.Generator().manual_seed(0))
    x_BTE = 10 * x_BTE.to(w)
    own, expected = attention.eval()(x_BTE), plain.eval()(x_BTE)
    alike = bool((own - expected).abs().max() <= 1e-3 * expected.std())
    # All pairs, also those beyond the trial.
    return alike and attention.flops(most, most) == plain.flops(most, most)
