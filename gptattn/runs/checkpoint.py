"""A checkpoint: one safetensors file, written whole or not at all, and verified when it is read.

Its tensors are the weights under the model's own names, AdamW's state as
`optimizer/PARAMETER/exp_avg` and so on, and the states of the random generators as `generator/...`.
Everything else is JSON in the file's header, under the key `gptattn`; a tensor in it lies in the
file under its path, `callbacks/StepClock/step_seconds` for example.

Next to `step=40.safetensors` lies `step=40.safetensors.sha256`, in the format of sha256sum. It is
written before the checkpoint gets its final name, and it stays if the checkpoint is lost. So a
checkpoint counts as damaged if it does not match its sum, or if only the sum is there. A checkpoint
without a sum, such as one copied by hand, is judged by its content alone.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptattn.errors import CheckpointError
from gptattn.machine import disk
from gptattn.machine.untrusted import read_bytes
from gptattn.runs.folder import RunFolder, step_of, sum_of
from gptattn.runs.tensor_file import opened, outline, write_tensors

Check = Callable[[dict[str, Any], Path], object]  # of a content and its file
KEPT = 2  # checkpoints: the newest, and one to fall back on
SUM_BYTES = 4_000  # at most
HEADER_KEY = "gptattn"  # the key of our JSON in the file's metadata
HEADER_CHARACTERS = 16_000_000  # at most; a model of 1,000 layers needs 5 million
TENSOR = "__tensor__"  # the key in the JSON whose value names the tensor that belongs there


@dataclass(frozen=True)
class Chosen:
    """The newest good checkpoint, and every newer one with the reason why it was not used."""

    path: Path
    content: dict[str, Any]
    passed_over: list[tuple[Path, str]]

    def warning(self) -> str | None:
        """Return one line with the checkpoints not used and the one used; None if all were good."""
        if not self.passed_over:
            return None
        bad = ", ".join(f"{path.name} {reason}" for path, reason in self.passed_over)
        return f"warning: checkpoint: {bad}; using {self.path} instead"


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and its SHA-256; `path` appears once all of it is on the disk.

    `content["weights"]` maps names to tensors. Its other values may be tensors, whatever JSON can
    hold, and dicts (with strings as keys) and lists of these. Makes the folder of `path` inside the
    run's folder, which must exist. Raises DiskError if the disk refuses.
    """
    run = path.parent.parent
    tensors, rest = _flattened(content)
    try:
        with disk.replacing(path, run, sum(t.nbytes for t in tensors.values())) as file:
            sha256 = hashlib.sha256()

            def write(piece: memoryview) -> None:
                sha256.update(piece)
                file.write(piece)

            write_tensors(write, tensors, {"format": "pt", HEADER_KEY: rest})
            _write_sum(path, sha256.hexdigest())
    except BaseException:
        if not os.path.lexists(path):
            sum_of(path).unlink(missing_ok=True)
        raise


def _flattened(content: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Return the content's tensors by name, and the rest as JSON that says where each belongs."""
    found: dict[str, Tensor] = {}

    def emptied(node: Any, name: str) -> Any:
        if isinstance(node, Tensor):
            found[name] = node
            return {TENSOR: name}
        if isinstance(node, dict):
            return {key: emptied(value, f"{name}/{key}") for key, value in node.items()}
        if isinstance(node, list):
            return [emptied(value, f"{name}/{i}") for i, value in enumerate(node)]
        return node

    rest = {key: emptied(value, key) for key, value in content.items() if key != "weights"}
    return content["weights"] | found, json.dumps(rest, separators=(",", ":"))


def _unflattened(tensors: dict[str, Tensor], text: str) -> dict[str, Any]:
    """Undo `_flattened`. Raises ValueError if the JSON does not match the tensors."""
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
        rest = whole(json.loads(text))
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header names a tensor that the file lacks: {error}") from None
    if not isinstance(rest, dict):
        raise ValueError("its header is not a JSON object")
    return rest | {"weights": weights}


def _write_sum(path: Path, digest: str) -> None:
    # Until the checkpoint is replaced, the sum of the old one must be valid too.
    old = _sums(path) if path.exists() else []
    lines = "".join(f"{each}  {path.name}\n" for each in [digest, *old[:1]])
    disk.write_atomically(sum_of(path), lambda file: file.write(lines.encode()))


def _sums(path: Path) -> list[str]:
    """Return the digests that the checkpoint may have; empty if it has no file of sums."""
    try:
        text = read_bytes(sum_of(path), SUM_BYTES).decode("ascii", errors="replace")
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return ["none"]  # the file of sums is unusable, so no checkpoint matches it
    return [line.partition(" ")[0] for line in text.splitlines()] or ["none"]


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


def choose_checkpoint(folder: RunFolder, check: Check | None = None) -> Chosen:
    """Read the run's newest good checkpoint; `check` is as in `read_checkpoint`.

    Raises CheckpointError if no checkpoint is good.
    """
    passed_over: list[tuple[Path, str]] = []
    for path in folder.known_checkpoints():
        try:
            with opened(path):  # checks the header before the whole file is read for its sum
                _check_sum(path)
            return Chosen(path, read_checkpoint(path, check), passed_over)
        except CheckpointError as error:
            passed_over.append((path, _short(error, path)))
    bad = ", ".join(f"{path.name} {reason}" for path, reason in passed_over)
    raise CheckpointError(
        "checkpoint", f"none in {folder.checkpoints} can be used ({bad or 'there is none'})"
    )


def _short(error: CheckpointError, path: Path) -> str:
    """What is wrong with the file, without its path and without advice."""
    return error.message.removeprefix(str(path)).lstrip(": ").partition(";")[0]


def refuse_pickles(folder: RunFolder) -> None:
    """Raise CheckpointError if all checkpoints of the run are pickles of an earlier version."""
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
        raise CheckpointError("checkpoint", f"{path} is damaged (its SHA-256 does not match)")


def read_checkpoint(path: Path, check: Check | None = None) -> dict[str, Any]:
    """Return the content that `write_checkpoint` wrote, with its tensors on the CPU.

    `check` is first called with the same content on the meta device, so it can refuse names, dtypes
    and shapes before memory is taken for them. Raises CheckpointError if the file is missing,
    damaged or not a checkpoint, or if `check` raises ValueError.
    """
    with opened(path) as file:
        rest = (file.metadata() or {}).get(HEADER_KEY)
        if rest is None or len(rest) > HEADER_CHARACTERS:
            raise ValueError("it is not a checkpoint of gptattn: its header describes no run")
        names = list(file.keys())
        if check is not None:
            check(_unflattened(outline(file), rest), path)
        # Cloned, because the library's tensors are views of the file and change with it.
        return _unflattened({name: file.get_tensor(name).clone() for name in names}, rest)
