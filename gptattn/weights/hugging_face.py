"""The files of a Hugging Face checkpoint folder: config.json and tensors in safetensors.

Such a folder may come from anywhere, so its sizes are checked before any memory is allocated.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gptattn.errors import CheckpointError, NumericError
from gptattn.machine.disk import write_atomically
from gptattn.runs.tensor_file import read_tensors, write_tensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # of weights split over files
# Patterns of the files fetched from the hub.
FILES = (CONFIG, WEIGHTS, INDEX, "model-*-of-*.safetensors")

Parsed = TypeVar("Parsed")


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder has a config.json, like Hugging Face's and unlike run folders."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """Return `parse(content)` for the content of config.json.

    Raises CheckpointError if the file is missing or damaged, or if `parse` raises a ValueError or
    what missing keys and wrong types raise.
    """
    with _one_line(folder / CONFIG):
        return parse(_read_json(folder / CONFIG))


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


def _read_json(file: Path) -> Any:
    return json.loads(file.read_bytes().decode("utf-8"))


def check_accepted(node: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError unless the key has one of these values; a missing one has the first."""
    for name, allowed in accepted.items():
        if node.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{name} is {node[name]!r:.60}, but must be {allowed[0]!r}")


def read_weights(folder: Path, prefix: str, skipped: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the folder's tensors, except those whose names end as in `skipped`.

    They are memory-mapped, and named without the prefix. Raises CheckpointError if a file is
    missing or damaged, or holds a tensor of integers.
    """
    found: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            here = read_tensors(file)
        except CheckpointError as error:
            raise CheckpointError("path", error.message) from None
        for name, tensor in here.items():
            plain = name.removeprefix(prefix)
            if f".{plain}".endswith(skipped):
                continue
            if not tensor.is_floating_point():
                raise CheckpointError(
                    "path", f"{file}: {name[:80]} is {tensor.dtype}, not floating-point"
                )
            if plain in found:
                raise CheckpointError("path", f"{file} has a second tensor {name[:100]!r}")
            found[plain] = tensor
    return found


def check_layers(folder: Path, weights: Mapping[str, Tensor], layers: str, count: int) -> None:
    """Raise CheckpointError for fewer layers than `count`; their names begin with `layers`."""
    pattern = re.compile(rf"{re.escape(layers)}(\d+)\.", re.ASCII)
    found = len({match[1] for name in weights if (match := pattern.match(name))})
    if found < count:
        raise CheckpointError(
            "path", f"{folder} lacks {layers}{found}: {CONFIG} has {count} layers"
        )


def check_weights(
    folder: Path, weights: Mapping[str, Tensor], outlined: Mapping[str, Tensor]
) -> None:
    """Raise CheckpointError unless the weights have the names and shapes of `outlined`.

    Raises NumericError if one is not finite.
    """
    for name in [*outlined, *weights]:
        if name not in weights:
            raise CheckpointError("path", f"{folder} lacks {name}")
        if name not in outlined:
            raise CheckpointError("path", f"{folder} has an unknown tensor {name[:100]!r}")
        is_now, expected = list(weights[name].shape), list(outlined[name].shape)
        if is_now != expected:
            raise CheckpointError("path", f"{folder}: {name} is {is_now}, not {expected}")
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise NumericError("path", f"{folder}: {name} is not finite; use other weights")


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights: one, or those that the index names.

    Raises CheckpointError for an index that cannot be used.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.is_file():
        return [folder / WEIGHTS]
    with _one_line(index):
        names = {str(name) for name in _read_json(index)["weight_map"].values()}
        for name in names:
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"{name[:60]!r} is not the name of a file beside it")
        if not names:
            raise ValueError("it names no file")
    return [folder / name for name in sorted(names)]


def write_folder(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a folder that transformers opens. Raises DiskError if the disk refuses."""
    text = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, weights, {})
    write_atomically(folder / CONFIG, lambda file: file.write(text.encode()))
