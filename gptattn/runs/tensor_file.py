"""Reads and writes safetensors files, whose errors become one line: no pickle, no code to run."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gptattn.errors import CheckpointError, DiskError, lacks_memory
from gptattn.machine import disk


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn errors of reading a safetensors file in this block into a CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError("checkpoint", f"{file} does not exist; give another path") from None
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        if lacks_memory(error):  # the file may be good
            raise
        reason = str(error).partition("\n")[0][:300]
        if isinstance(error, SafetensorError):
            reason = f"it is not a complete safetensors file: {reason}"
        raise CheckpointError("checkpoint", f"{file} cannot be read ({reason})") from None


@contextlib.contextmanager
def disk_errors(path: Path, size: int) -> Iterator[None]:
    """Turn safetensors' error of writing `size` bytes to a disk that refuses into a DiskError."""
    try:
        yield
    except SafetensorError as error:
        free = disk.free_bytes(path.parent)
        raise DiskError(
            str(path),
            f"{error}; at least {size:,} bytes are needed and {free:,} are free, make room",
        ) from error


def metadata(file: Path) -> dict[str, str]:
    """Return what is in the file's header beside the tensors."""
    with safe_open(file, framework="pt") as found:
        return found.metadata() or {}


def outline(file: Path) -> dict[str, Tensor]:
    """Return the file's tensors on the meta device: names, dtypes and shapes."""
    with reading(file), safe_open(file, framework="pt") as found:
        return {name: _on_meta(found.get_slice(name)) for name in found.keys()}  # noqa: SIM118


def _on_meta(part: Any) -> Tensor:
    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
    kinds |= {"BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
    kinds |= {"I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool, "U32": torch.uint32}
    if part.get_dtype() not in kinds:
        raise ValueError(f"a tensor in it is {part.get_dtype()}, which no model of ours holds")
    return torch.empty(part.get_shape(), dtype=kinds[part.get_dtype()], device="meta")


def read_tensors(file: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return the named tensors of the file, or all. Raises CheckpointError as `reading` does."""
    with reading(file), safe_open(file, framework="pt") as found:
        wanted = found.keys() if names is None else names
        return {name: found.get_tensor(name) for name in wanted}


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a file of weights; it appears once all of it is on the disk. Raises DiskError."""
    size = sum(tensor.nbytes for tensor in weights.values())
    part = path.with_name(f"{path.name}.part")
    with disk.writing(path, lambda: size), disk_errors(path, size):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            own = {name: t.detach().cpu().contiguous().clone() for name, t in weights.items()}
            save_file(own, part, {"format": "pt"})
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
