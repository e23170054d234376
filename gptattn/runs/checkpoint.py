"""A checkpoint: one safetensors file, written whole or not at all, and verified when read.

It holds the weights, what Lightning restores itself (the optimizer, its loops and the state of the
user's callbacks), and a `RunState`. Weights have the model's own names; other tensors have their
path in Lightning's checkpoint, `optimizer_states/0/state/...`. The header holds everything else as
JSON, under the key `gptattn`, and a SHA-256 of the whole content.
"""

import hashlib
import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gptattn.errors import CheckpointError
from gptattn.runs.folder import RunFolder, step_of
from gptattn.runs.tensor_file import explain_read_errors, read_tensors, write_tensors

KEPT = 2  # checkpoints: the newest, and one to fall back on
HEADER_KEY, SUM_KEY = "gptattn", "sha256"  # in the file's header
TENSOR, PAIRS = "__tensor__", "__pairs__"  # keys in the JSON: a tensor, a dict with other keys
MODEL = "model."  # Lightning's prefix of the names of weights
STATE = "run"  # of the `RunState`, in Lightning's checkpoint


@dataclass
class RunState:
    """A run's progress, which its callbacks keep up to date; at first, none."""

    step: int = 0  # optimizer steps taken
    seconds: float = 0.0  # of training, up to the newest timed step
    step_seconds: "array[float]" = field(default_factory=lambda: array("d"))  # of each timed step
    shared: bool = False  # whether other runs share the machine
    complete: bool = False  # whether its budget was used up, or its accuracy reached, at this step
    validation_due: bool = False  # whether this step's validation has not ended yet
    # The record: its size in bytes, the newest value of each metric, the step of the newest row
    # with a training loss, the number of steps timed by then, and values logged since, by metric.
    row_bytes: int = 0
    last: dict[str, float | None] = field(default_factory=dict)
    logged_step: int = 0
    timed_steps: int = 0
    since_row: dict[str, list[Tensor]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)  # states of random generators
    facts: dict[str, Any] = field(default_factory=dict)  # `resume.collect_facts`, to compare with

    def store(self, content: dict[str, Any]) -> None:
        """Put the state into the content of a checkpoint."""
        steps = torch.tensor(self.step_seconds, dtype=torch.float64)
        content[STATE] = vars(self) | {"step_seconds": steps}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "RunState":
        """Return the state in the content of a checkpoint.

        Raises CheckpointError if it has none, or one from another version.
        """
        try:
            steps = array("d", content[STATE]["step_seconds"].tolist())
            return cls(**content[STATE] | {"step_seconds": steps})
        except (LookupError, TypeError) as error:
            raise CheckpointError(
                "resume", "the checkpoint is from another version of gptattn; start a new run"
            ) from error


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write Lightning's checkpoint; `path` appears once all of it is on the disk.

    `content` may hold tensors, whatever JSON can hold, and dicts and lists of these. The run's
    folder must exist. Raises DiskError if the disk refuses.
    """
    tensors = weights_of(content)
    rest = {key: value for key, value in content.items() if key != "state_dict"}
    text = json.dumps(_take_tensors(rest, "", tensors), separators=(",", ":"))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(path, tensors, {HEADER_KEY: text, SUM_KEY: _hash_content(text, tensors)})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content that `write_checkpoint` wrote, with its tensors on the CPU.

    Raises CheckpointError if the file is missing, damaged or not a checkpoint.
    """
    with explain_read_errors(path):
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        if HEADER_KEY not in header:
            raise ValueError("it is not a gptattn checkpoint: its header has no run")
        tensors = read_tensors(path)
        if header.get(SUM_KEY) != _hash_content(header[HEADER_KEY], tensors):
            raise ValueError("it is damaged: its SHA-256 does not match")
        rest = _put_tensors(json.loads(header[HEADER_KEY]), tensors)
        return rest | {"state_dict": {f"{MODEL}{name}": t for name, t in tensors.items()}}


def weights_of(content: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's content under the model's own names."""
    return {name.removeprefix(MODEL): t for name, t in content["state_dict"].items()}


def _hash_content(text: str, tensors: dict[str, Tensor]) -> str:
    """Return a SHA-256 of the text and of the tensors, which lie on the CPU, with their names."""
    sha = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _take_tensors(node: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the node for JSON, with its tensors moved to `tensors` under their paths."""
    if isinstance(node, Tensor):
        tensors[name] = node
        return {TENSOR: name}
    dot = f"{name}/" if name else ""
    if isinstance(node, dict):
        values = {key: _take_tensors(value, f"{dot}{key}", tensors) for key, value in node.items()}
        plain = all(isinstance(key, str) for key in node)
        return values if plain else {PAIRS: list(values.items())}
    if isinstance(node, list | tuple):
        return [_take_tensors(value, f"{dot}{i}", tensors) for i, value in enumerate(node)]
    return node


def _put_tensors(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `_take_tensors`, moving the tensors back."""
    if isinstance(node, list):
        return [_put_tensors(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if TENSOR in node:
        return tensors.pop(node[TENSOR])
    if PAIRS in node:
        return {key: _put_tensors(value, tensors) for key, value in node[PAIRS]}
    return {key: _put_tensors(value, tensors) for key, value in node.items()}


def remove_old(folder: RunFolder, newest: Path) -> None:
    """Keep `newest` and the one before it, and remove the others.

    Those of later steps go too: the run has resumed from an earlier one, and repeats those steps.
    """
    checkpoints = folder.known_checkpoints()
    kept = [path for path in checkpoints if step_of(path) <= step_of(newest)][:KEPT]
    for path in {*checkpoints} - {*kept}:
        path.unlink(missing_ok=True)
