"""Checkpoints: written whole or not at all, read without running anything that is in them."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from gptattn.errors import CheckpointError


class AtomicCheckpointIO(CheckpointIO):
    """Writes beside the target, flushes to the disk, then renames: a name means a whole file."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path), map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Call `write(binary file)`; `path` appears, or is replaced, when all of it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        partial.unlink(missing_ok=True)


def read_checkpoint(path: Path, map_location: Any | None = None) -> dict[str, Any]:
    """The only place that reads a checkpoint: tensors and plain values, no code.

    Raises CheckpointError for a file that is missing, damaged, or holds anything else.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError("checkpoint", f"{path} does not exist; give another path") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError("checkpoint", f"{path} cannot be read ({reason})") from None


def read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    """Raises CheckpointError for a file that is missing, cut short or none of its kind."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except FileNotFoundError:
        raise CheckpointError("checkpoint", f"{file} does not exist; give another path") from None
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError("checkpoint", f"{file} cannot be read ({reason})") from None
