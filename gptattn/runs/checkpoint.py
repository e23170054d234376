"""Checkpoints: written whole or not at all, read without running anything that is in them.

Beside `step=40.ckpt` lies `step=40.ckpt.sha256`, in the form of sha256sum. It is there before the
checkpoint gets its name, and stays where the file is lost: one that does not fit it, or is not
there, is damage. A checkpoint that somebody brought without it is judged by what it holds.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptattn.errors import CheckpointError, lacks_memory
from gptattn.machine import disk
from gptattn.machine.untrusted import read_bytes
from gptattn.runs.archive import check_archive

SUM = ".sha256"
KEPT = 2  # the newest, and one to fall back on
SUM_BYTES = 4_000
# What is written in a run's folder, and in its checkpoints'.
NAMES = (
    r"config\.yaml|summary\.json|identity\.json|metrics\.jsonl|tokenizer\.json|vocab\.json"
    r"|merges\.txt|step=\d+\.ckpt(?:\.sha256)?"
)


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


def write_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write the state and its SHA-256; `path` appears when all of it is on the disk.

    The folder that `path` lies in is made, in the run's folder, which is there.
    """
    run = path.parent.parent
    try:
        with disk.replacing(path, run, _tensor_bytes(checkpoint)) as file:
            hashed = _Hashed(file)
            hashed.save(checkpoint)
            _write_sum(path, hashed.sha256.hexdigest())
    except BaseException:
        if not os.path.lexists(path):
            _sum_of(path).unlink(missing_ok=True)
        raise


def _tensor_bytes(checkpoint: dict[str, Any]) -> int:
    """What its tensors take in a file, each storage once."""
    storages = [tensor.untyped_storage() for tensor in _tensors(checkpoint)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict | list | tuple):
        for part in node.values() if isinstance(node, dict) else node:
            yield from _tensors(part)


def remove_checkpoint(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sum_of(path).unlink(missing_ok=True)


class _Hashed:
    """A file to write to, and the SHA-256 of what has been written."""

    def __init__(self, file: disk.Part) -> None:
        self.file, self.sha256 = file, hashlib.sha256()
        self._refused: OSError | None = None

    def save(self, checkpoint: dict[str, Any]) -> None:
        try:
            torch.save(checkpoint, self)  # type: ignore[arg-type]
        except RuntimeError:
            # torch's writer may put an error of its own in place of the disk's.
            if self._refused is None:
                raise
            raise self._refused from None

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self._refused = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _sum_of(path: Path) -> Path:
    return path.with_name(path.name + SUM)


def _write_sum(path: Path, digest: str) -> None:
    # Until the file is replaced the old one must fit as well.
    old = _sums(path) if path.exists() else []
    lines = "".join(f"{each}  {path.name}\n" for each in [digest, *old[:1]])
    disk.write_atomically(_sum_of(path), lambda file: file.write(lines.encode()))


def _sums(path: Path) -> list[str]:
    """The digests that the file may have; none where nothing has been noted of it."""
    try:
        text = read_bytes(_sum_of(path), SUM_BYTES).decode("ascii", errors="replace")
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return ["none"]  # something is there, and fits nothing
    return [line.partition(" ")[0] for line in text.splitlines()]


def step_of(path: Path) -> int:
    """The optimizer step in a checkpoint's name; -1 for another name."""
    match = re.fullmatch(r"step=(\d+)\.ckpt", path.name)
    return int(match.group(1)) if match else -1


def known_checkpoints(folder: Path) -> list[Path]:
    """Every checkpoint that is, or by its sum should be, in the folder; the newest first.

    One that is being saved, or was when its process died, has a sum and no name yet: it is not
    among them.
    """
    names = {file.name for file in folder.glob("*.ckpt") if not file.is_dir()}
    sums = {file.name.removesuffix(SUM) for file in folder.glob(f"*.ckpt{SUM}")}
    parts = {re.sub(f"{disk.PART}$", "", file.name) for file in folder.glob("*.part")}
    names |= sums - parts
    return sorted((folder / name for name in names), key=step_of, reverse=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed save has left. Nobody may be saving in the folder meanwhile."""
    for target in disk.remove_leftovers(folder, NAMES):
        if target.suffix == ".ckpt" and not os.path.lexists(target):
            _sum_of(target).unlink(missing_ok=True)


def remove_old(folder: Path, newest: Path) -> None:
    """Keep `newest` and the one before it; what is later than `newest` was not of its past."""
    later = [path for path in known_checkpoints(folder) if step_of(path) > step_of(newest)]
    earlier = [path for path in known_checkpoints(folder) if step_of(path) < step_of(newest)]
    for path in [*later, *earlier[KEPT - 1 :]]:
        remove_checkpoint(path)


def choose_checkpoint(
    folder: Path,
    map_location: Any | None = "cpu",
    check: Callable[[dict[str, Any]], object] | None = None,
    most: int | None = None,
) -> Chosen:
    """Read the newest good checkpoint in the folder. Raises CheckpointError where none is good."""
    passed_over: list[tuple[Path, str]] = []
    for path in known_checkpoints(folder):
        try:
            _check_file(path, most)
            _check_sum(path)
            return Chosen(path, read_checkpoint(path, map_location, check, most), passed_over)
        except CheckpointError as error:
            passed_over.append((path, error.message.removeprefix(f"{path} ").partition(";")[0]))
    bad = ", ".join(f"{path.name} {reason}" for path, reason in passed_over)
    raise CheckpointError("checkpoint", f"none in {folder} is good ({bad or 'there is none'})")


def _check_file(path: Path, most: int | None) -> None:
    """Size and header, before all of it is read for its sum."""
    try:
        check_archive(path, most)
    except FileNotFoundError:
        raise CheckpointError("checkpoint", f"{path} does not exist; give another path") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)[:300]
        raise CheckpointError("checkpoint", f"{path} cannot be read ({reason})") from None


def _check_sum(path: Path) -> None:
    known = _sums(path)
    if not known:
        return  # of an earlier version; what it holds is checked on reading
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError("checkpoint", f"{path} cannot be read ({error.strerror})") from None
    if digest not in known:
        raise CheckpointError("checkpoint", f"{path} is damaged (its SHA-256 is another)")


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
        if lacks_memory(error):  # which says nothing of the file
            raise
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
