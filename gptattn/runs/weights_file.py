"""A file of weights in the form of safetensors: read by its header first; nothing in it runs."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from gptattn.errors import CheckpointError

FLOATS = ["F64", "F32", "F16", "BF16"]


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """The names and shapes in a safetensors file's header; no tensor is read.

    Raises CheckpointError for a file that is missing, cut short, or none of its kind.
    """
    from safetensors import safe_open

    with _safetensors_errors(file), safe_open(file, framework="pt") as opened:
        shapes = {}
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            if part.get_dtype() not in FLOATS:
                raise ValueError(f"{name[:80]} is {part.get_dtype()}, not one of {FLOATS}")
            shapes[name] = list(part.get_shape())
        return shapes


def read_safetensors(file: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """These tensors of the file. Raises CheckpointError as `tensor_shapes` does."""
    from safetensors import safe_open

    with _safetensors_errors(file), safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in names}


@contextlib.contextmanager
def _safetensors_errors(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")
        yield
    except FileNotFoundError:
        raise CheckpointError("checkpoint", f"{file} does not exist; give another path") from None
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError("checkpoint", f"{file} cannot be read ({reason[:300]})") from None
