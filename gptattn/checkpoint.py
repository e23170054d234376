"""Checkpoints: written whole or not at all, read without running anything that is in them."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from gptattn.archive import check_archive
from gptattn.errors import CheckpointError

# Names by which Lightning's load_from_checkpoint and Hydra make objects; neither reads ours.
MAKERS = {
    "_target_",
    "_instantiator",
    "_class_path",
    "class_path",
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_type",
}
FLOATS = ["F64", "F32", "F16", "BF16"]


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


def read_checkpoint(
    path: Path,
    map_location: Any | None = None,
    check: Callable[[dict[str, Any]], object] | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """The only place that reads a checkpoint: tensors and plain values, no code.

    `check` sees it first while its tensors are still on the disk, to look at names and shapes.
    Raises CheckpointError for a file that is missing, damaged, larger than `most` bytes, or holds
    anything else.
    """
    try:
        check_archive(path, most)
        # First mapped: its tensors take no memory then.
        for where, mapped in (("cpu", True), (map_location, False)):
            checkpoint = torch.load(path, map_location=where, mmap=mapped, weights_only=True)
            check_plain(checkpoint)
            if check is not None:
                check(checkpoint)
        return checkpoint
    except FileNotFoundError:
        raise CheckpointError("checkpoint", f"{path} does not exist; give another path") from None
    except CheckpointError:
        raise
    # What torch's reader meets in a damaged file has no end: TypeError, AssertionError and more.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError("checkpoint", f"{path} cannot be read ({reason[:300]})") from None


def check_plain(checkpoint: Any) -> None:
    """Raise ValueError where it is no dict, or a name in it says what class to make."""
    if not isinstance(checkpoint, dict):
        raise ValueError("it is no checkpoint: it holds no names")
    waiting, seen = [checkpoint], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            for key in node:
                if isinstance(key, str) and key in MAKERS:
                    raise ValueError(f"it holds {key!r}, which our checkpoints have not")
            waiting += [value for value in node.values() if isinstance(value, dict | list | tuple)]
        else:
            waiting += [value for value in node if isinstance(value, dict | list | tuple)]


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


@contextmanager
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
