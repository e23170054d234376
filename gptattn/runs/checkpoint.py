"""A checkpoint: one safetensors file, written whole or not at all, and verified when it is read.

Its tensors are the weights under the model's own names, and all others that Lightning saves under
their path in its checkpoint, `optimizer_states/0/state/...`. Everything else is JSON in the file's
header, under the key `gptattn`.

Next to `step=40.safetensors` lies `step=40.safetensors.sha256`, in the format of sha256sum. It is
written before the checkpoint gets its final name. A checkpoint without a sum, such as one copied by
hand, is judged by its content alone.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from gptattn.errors import CheckpointError
from gptattn.machine import disk
from gptattn.runs.folder import RunFolder, step_of, sum_of
from gptattn.runs.tensor_file import disk_errors, metadata, reading

KEPT = 2  # checkpoints: the newest, and one to fall back on
HEADER_KEY = "gptattn"  # the key of our JSON in the file's metadata
TENSOR, PAIRS = "__tensor__", "__pairs__"  # keys in the JSON: a tensor, a dict with other keys
MODEL = "model."  # Lightning's prefix of the names of weights


@dataclass(frozen=True)
class Chosen:
    """The newest good checkpoint, and every newer one with the reason why it was not used."""

    path: Path
    content: dict[str, Any]
    passed_over: list[tuple[Path, str]]


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write Lightning's checkpoint and its SHA-256; `path` appears once all of it is on the disk.

    Its values may be tensors, whatever JSON can hold, and dicts and lists of these. Makes the
    folder of `path` inside the run's folder, which must exist. Raises DiskError if the disk
    refuses.
    """
    state = content["state_dict"]
    tensors = {name.removeprefix(MODEL): tensor for name, tensor in state.items()}
    rest = {key: value for key, value in content.items() if key != "state_dict"}
    header = json.dumps(_emptied(rest, "", tensors), separators=(",", ":"))
    part = path.with_name(f"{path.name}.part")
    size = sum(tensor.nbytes for tensor in tensors.values())
    with disk.writing(path, lambda: size), disk_errors(path, size):
        path.parent.mkdir(exist_ok=True)
        try:
            save_file(_apart(tensors), part, {"format": "pt", HEADER_KEY: header})
            with part.open("rb+") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            line = f"{digest}  {path.name}\n".encode()
            disk.write_atomically(sum_of(path), lambda file: file.write(line))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
            if not path.exists():
                sum_of(path).unlink(missing_ok=True)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, each with memory of its own, as safetensors wants them."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        shared = own.numel() and own.untyped_storage().data_ptr() in seen
        part = own.untyped_storage().nbytes() != own.nbytes
        found[name] = own.clone() if shared or part else own
        seen.add(own.untyped_storage().data_ptr())
    return found


def _emptied(node: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the node as JSON has it; its tensors go into `tensors`, under their paths."""
    if isinstance(node, Tensor):
        tensors[name] = node
        return {TENSOR: name}
    dot = f"{name}/" if name else ""
    if isinstance(node, dict):
        values = {key: _emptied(value, f"{dot}{key}", tensors) for key, value in node.items()}
        plain = all(isinstance(key, str) for key in node)
        return values if plain else {PAIRS: list(values.items())}
    if isinstance(node, list | tuple):
        return [_emptied(value, f"{dot}{i}", tensors) for i, value in enumerate(node)]
    return node


def _filled(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `_emptied`; the tensors are taken out of `tensors`."""
    if isinstance(node, list):
        return [_filled(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if TENSOR in node:
        return tensors.pop(node[TENSOR])
    if PAIRS in node:
        return {key: _filled(value, tensors) for key, value in node[PAIRS]}
    return {key: _filled(value, tensors) for key, value in node.items()}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content that `write_checkpoint` wrote, with its tensors on the CPU.

    Raises CheckpointError if the file is missing, damaged or not a checkpoint.
    """
    with reading(path):
        header = metadata(path).get(HEADER_KEY)
        if header is None:
            raise ValueError("it is not a checkpoint of gptattn: its header describes no run")
        tensors = load_file(path)
        rest = _filled(json.loads(header), tensors)
        return rest | {"state_dict": {f"{MODEL}{name}": t for name, t in tensors.items()}}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return a checkpoint's weights under the model's own names. Raises as `read_checkpoint`."""
    state = read_checkpoint(path)["state_dict"]
    return {name.removeprefix(MODEL): tensor for name, tensor in state.items()}


def choose_checkpoint(folder: RunFolder, check: Callable[[dict[str, Any]], object]) -> Chosen:
    """Read the run's newest good checkpoint.

    `check` may refuse a content with CheckpointError. Raises CheckpointError if none is good.
    """
    passed_over: list[tuple[Path, str]] = []
    for path in folder.known_checkpoints():
        try:
            _check_sum(path)
            content = read_checkpoint(path)
            check(content)
            return Chosen(path, content, passed_over)
        except CheckpointError as error:
            reason = error.message.removeprefix(str(path)).lstrip(": ").partition(";")[0]
            passed_over.append((path, reason))
    bad = ", ".join(f"{path.name} {reason}" for path, reason in passed_over)
    raise CheckpointError(
        "checkpoint", f"none in {folder.checkpoints} can be used ({bad or 'there is none'})"
    )


def _check_sum(path: Path) -> None:
    if not sum_of(path).exists() or not path.exists():
        return
    known = sum_of(path).read_text(errors="replace").partition(" ")[0]
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != known:
            raise CheckpointError("checkpoint", f"{path} is damaged (its SHA-256 does not match)")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and its sum; either may be missing."""
    path.unlink(missing_ok=True)
    sum_of(path).unlink(missing_ok=True)


def remove_old(folder: RunFolder, newest: Path) -> None:
    """Keep `newest` and the one before it, and remove the others.

    Checkpoints of later steps are removed too: the run was resumed from an earlier one, and its
    steps are being repeated.
    """
    known = folder.known_checkpoints()
    later = [path for path in known if step_of(path) > step_of(newest)]
    earlier = [path for path in known if step_of(path) < step_of(newest)]
    for path in [*later, *earlier[KEPT - 1 :]]:
        remove_checkpoint(path)


def check_shapes(own: dict[str, Tensor], found: dict[str, Tensor], source: Path) -> None:
    """Raise CheckpointError if `found`, in the file `source`, differs from the model's `own`.

    Names and shapes must be equal. A floating-point tensor may have another precision; any other
    must have the same dtype.
    """
    for name in sorted(own.keys() | found.keys()):
        if name not in found or name not in own:
            which = "lacks" if name in own else "has an unknown"
            raise CheckpointError(
                "checkpoint", f"{source} {which} {name[:100]!r}: it belongs to another model"
            )
        theirs, ours = _described(found[name]), _described(own[name])
        if theirs != ours:
            raise CheckpointError(
                "checkpoint", f"{source}: {name} is {theirs}, the model's is {ours}"
            )


def _described(tensor: Tensor) -> str:
    """The shape, and the dtype unless it is floating-point."""
    kind = "" if tensor.is_floating_point() else f" of {tensor.dtype}"
    return f"{list(tensor.shape)}{kind}"
