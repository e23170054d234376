"""Reads and writes safetensors files, which run no code; their errors become one line."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptattn.errors import CheckpointError, lacks_memory
from gptattn.machine import disk


@contextlib.contextmanager
def explain_read_errors(file: Path) -> Iterator[None]:
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


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of the file by name. Raises CheckpointError if it cannot be read.

    They are memory-mapped: names, dtypes and shapes can be checked before the values are read.
    """
    with explain_read_errors(file):
        return load_file(file)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a file of tensors, with texts in its header; make its folder if there is none.

    The file appears once it is complete. Raises DiskError if the disk refuses.
    """
    own: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        own[name] = plain.clone() if place in memory else plain  # safetensors refuses shared memory
        memory.add(place)
    with disk.explain_disk_errors(path):  # the folder of the run may be gone
        path.parent.mkdir(exist_ok=True)
    with disk.replacing(path) as file:
        try:
            save_file(own, file.name, {"format": "pt", **header})
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code)) from error
