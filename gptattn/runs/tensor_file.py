"""Reads and writes safetensors files: named tensors after a JSON header, and no code to run.

The library reads them. Writing is our own: the library either opens the file itself, so that it
could not be replaced as `machine.disk` does it, or makes all bytes in memory first. A file has 8
bytes with the length of the header, the header in JSON, and the tensors' bytes without gaps.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptattn.errors import CheckpointError, lacks_memory
from gptattn.machine.disk import write_atomically

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint32: "U32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
ALIGNMENT = 8  # bytes; the first tensor starts at a multiple, which suits the widest dtype
BLOCK = 1 << 20  # bytes written at a time, few enough to stay in the cache while hashed


def write_tensors(
    write: Callable[[memoryview], object],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a whole safetensors file by calling `write` with one piece after the other.

    `metadata` goes into the header. Tensors that are on a GPU or not contiguous are copied, one at
    a time. Raises KeyError for a dtype that is not in DTYPES.
    """
    # Wide dtypes first, so that each tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    opening = json.dumps(header, separators=(",", ":")).encode()
    opening += b" " * (-len(opening) % ALIGNMENT)
    write(memoryview(len(opening).to_bytes(8, "little") + opening))
    for name in order:
        data = _bytes(tensors[name])
        for start in range(0, len(data), BLOCK):
            write(data[start : start + BLOCK])


def write_weights(path: Path, weights: Mapping[str, Tensor], root: Path | None = None) -> None:
    """Write a file of weights; it appears once all of it is on the disk.

    `root` is as in `disk.make_folder`. Raises DiskError if the disk refuses.
    """

    def write(file: Any) -> None:
        write_tensors(file.write, weights, {"format": "pt"})

    write_atomically(path, write, root)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open the file with `safetensors.safe_open`, which reads the header but no tensors.

    Raises CheckpointError, in one line, if the file is missing, damaged or not a safetensors file,
    and also for a ValueError raised while it is open.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if file.exists() and not file.is_file():  # opening a pipe would block
            raise ValueError("it is not a regular file")
        with safe_open(file, framework="pt") as found:
            yield found
    except FileNotFoundError:
        raise CheckpointError("checkpoint", f"{file} does not exist; give another path") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        if lacks_memory(error):  # the file may be good
            raise
        reason = str(error).partition("\n")[0][:300]
        if isinstance(error, SafetensorError):
            reason = f"it is not a complete safetensors file: {reason}"
        raise CheckpointError("checkpoint", f"{file} cannot be read ({reason})") from None


def outline(found: Any) -> dict[str, Tensor]:
    """Return the tensors of an `opened` file on the meta device: names, dtypes and shapes.

    Raises ValueError for a dtype that is not in DTYPES.
    """
    return {name: _on_meta(found.get_slice(name)) for name in found.keys()}  # noqa: SIM118


def _on_meta(part: Any) -> Tensor:
    dtype = TORCH_DTYPES.get(part.get_dtype())
    if dtype is None:
        raise ValueError(f"a tensor in it is {part.get_dtype()}, which no checkpoint of ours holds")
    return torch.empty(part.get_shape(), dtype=dtype, device="meta")


def read_tensors(file: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the named tensors of the file. Raises CheckpointError as `opened` does."""
    with opened(file) as found:
        return {name: found.get_tensor(name) for name in names}
