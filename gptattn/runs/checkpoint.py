"""A checkpoint: one safetensors file, written whole or not at all, and verified when it is read.

Its tensors are the weights under the model's own names, AdamW's state under
`optimizer/PARAMETER/exp_avg` and the like, and the generators' states under `generator/`. All the
rest is JSON in the header, under the key `gptattn`.

Beside `step=40.safetensors` lies `step=40.safetensors.sha256`, in the form of sha256sum. It is
written before the checkpoint gets its name, and stays if the checkpoint is lost: a checkpoint that
does not fit it, or is not there, is damage. A checkpoint without a sum, copied here by hand, is
judged by its content alone.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptattn.errors import CheckpointError
from gptattn.machine import disk
from gptattn.machine.untrusted import read_bytes
from gptattn.runs.folder import RunFolder, step_of, sum_of
from gptattn.runs.tensor_file import TORCH_DTYPES, opened, write_tensors

KEPT = 2  # the newest, and one to fall back on
SUM_BYTES = 4_000
HEADER = "gptattn"  # the key of our JSON in the file's metadata
HEADER_CHARACTERS = 16_000_000  # of a model of 1,000 layers, 5 million
TENSOR = "__tensor__"  # in the JSON: here is the tensor of that name


@dataclass(frozen=True)
class Chosen:
    """The newest good checkpoint, and each newer one with what is wrong with it."""

    path: Path
    content: dict[str, Any]
    passed_over: list[tuple[Path, str]]

    def warning(self) -> str | None:
        """One line that names what was passed over and what is used; None where nothing was."""
        if not self.passed_over:
            return None
        bad = ", ".join(f"{path.name} {reason}" for path, reason in self.passed_over)
        return f"warning: checkpoint: {bad}; {self.path} is used instead"


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and its SHA-256; `path` appears when all of it is on the disk.

    content: `weights`, a tensor by each name; beside them any dicts with names as keys, lists,
    tensors and JSON's own values. The folder that `path` lies in is made, inside the run's folder,
    which must exist.
    """
    run = path.parent.parent
    tensors, outline = _taken_apart(content)
    try:
        with disk.replacing(path, run, sum(t.nbytes for t in tensors.values())) as file:
            sha256 = hashlib.sha256()

            def write(piece: memoryview) -> None:
                sha256.update(piece)
                file.write(piece)

            write_tensors(write, tensors, {"format": "pt", HEADER: outline})
            _write_sum(path, sha256.hexdigest())
    except BaseException:
        if not os.path.lexists(path):
            sum_of(path).unlink(missing_ok=True)
        raise


def _taken_apart(content: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """The content's tensors by name, and the rest of it as JSON that tells where each one goes."""
    found: dict[str, Tensor] = {}

    def outline(node: Any, name: str) -> Any:
        if isinstance(node, Tensor):
            found[name] = node
            return {TENSOR: name}
        if isinstance(node, dict):
            return {key: outline(value, f"{name}/{key}") for key, value in node.items()}
        if isinstance(node, list):
            return [outline(value, f"{name}/{i}") for i, value in enumerate(node)]
        return node

    rest = {key: outline(value, key) for key, value in content.items() if key != "weights"}
    return content["weights"] | found, json.dumps(rest, separators=(",", ":"))


def _put_together(tensors: dict[str, Tensor], outline: str) -> dict[str, Any]:
    """The content that `_taken_apart` took apart. Raises ValueError where the two do not fit."""
    weights = dict(tensors)

    def whole(node: Any) -> Any:
        if isinstance(node, dict) and TENSOR in node:
            return weights.pop(node[TENSOR])
        if isinstance(node, dict):
            return {key: whole(value) for key, value in node.items()}
        if isinstance(node, list):
            return [whole(value) for value in node]
        return node

    try:
        rest = whole(json.loads(outline))
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header names no tensor of its own: {error}") from None
    if not isinstance(rest, dict):
        raise ValueError("its header holds no names")
    return rest | {"weights": weights}


def _write_sum(path: Path, digest: str) -> None:
    # Until the file is replaced the old one must fit as well.
    old = _sums(path) if path.exists() else []
    lines = "".join(f"{each}  {path.name}\n" for each in [digest, *old[:1]])
    disk.write_atomically(sum_of(path), lambda file: file.write(lines.encode()))


def _sums(path: Path) -> list[str]:
    """The digests that the file may have; none where nothing has been noted of it."""
    try:
        text = read_bytes(sum_of(path), SUM_BYTES).decode("ascii", errors="replace")
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return ["none"]  # something is there, and fits nothing
    return [line.partition(" ")[0] for line in text.splitlines()]


def remove_checkpoint(path: Path) -> None:
    path.unlink(missing_ok=True)
    sum_of(path).unlink(missing_ok=True)


def remove_old(folder: RunFolder, newest: Path) -> None:
    """Keep `newest` and the one before it; remove later ones too: they are of another past."""
    known = folder.known_checkpoints()
    later = [path for path in known if step_of(path) > step_of(newest)]
    earlier = [path for path in known if step_of(path) < step_of(newest)]
    for path in [*later, *earlier[KEPT - 1 :]]:
        remove_checkpoint(path)


def choose_checkpoint(
    folder: RunFolder, check: Callable[[dict[str, Any]], object] | None = None
) -> Chosen:
    """Read the run's newest good checkpoint. Raises CheckpointError where none is good.

    `check` as in `read_checkpoint`.
    """
    passed_over: list[tuple[Path, str]] = []
    for path in folder.known_checkpoints():
        try:
            with opened(path):  # its header, before all of it is read for its sum
                _check_sum(path)
            return Chosen(path, read_checkpoint(path, check), passed_over)
        except CheckpointError as error:
            passed_over.append((path, error.message.removeprefix(f"{path} ").partition(";")[0]))
    bad = ", ".join(f"{path.name} {reason}" for path, reason in passed_over)
    raise CheckpointError(
        "checkpoint", f"none in {folder.checkpoints} is good ({bad or 'there is none'})"
    )


def refuse_pickles(folder: RunFolder) -> None:
    """Raise CheckpointError where the run has no checkpoints but those of an earlier version."""
    if folder.pickles and not folder.known_checkpoints():
        raise CheckpointError(
            "checkpoint",
            f"{folder.pickles[-1]} is a pickle of an earlier version, and pickles are not read; "
            "use the version that wrote it, or train the run again",
        )


def _check_sum(path: Path) -> None:
    known = _sums(path)
    if not known:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest not in known:
        raise CheckpointError("checkpoint", f"{path} is damaged (its SHA-256 is another)")


def read_checkpoint(
    path: Path, check: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, Any]:
    """The content that `write_checkpoint` wrote, its tensors on the CPU.

    `check` sees it first, with tensors on the meta device: names, dtypes and shapes, before memory
    is taken for them. Raises CheckpointError for a file that is missing, damaged, or anything else,
    and for a ValueError of `check`.
    """
    with opened(path) as file:
        outline = (file.metadata() or {}).get(HEADER)
        if outline is None or len(outline) > HEADER_CHARACTERS:
            raise ValueError("it is no checkpoint of ours: its header says nothing of a run")
        names = list(file.keys())
        if check is not None:
            check(_put_together({name: _on_meta(file.get_slice(name)) for name in names}, outline))
        # Cloned: the library's own lie in the file's pages, and change with the file.
        return _put_together({name: file.get_tensor(name).clone() for name in names}, outline)


def _on_meta(part: Any) -> Tensor:
    dtype = TORCH_DTYPES.get(part.get_dtype())
    if dtype is None:
        raise ValueError(f"a tensor in it is {part.get_dtype()}, which no checkpoint of ours holds")
    return torch.empty(part.get_shape(), dtype=dtype, device="meta")
