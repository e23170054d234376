"""A checkpoint's file: written whole or not at all, verified, read without running what is in it.

Beside `step=40.ckpt` lies `step=40.ckpt.sha256`, in the form of sha256sum. It is there before the
checkpoint gets its name, and stays where the file is lost: one that does not fit it, or is not
there, is damage. A checkpoint that somebody brought without it is judged by what it holds.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptattn.errors import CheckpointError, lacks_memory
from gptattn.machine import disk
from gptattn.machine.untrusted import read_bytes
from gptattn.runs.archive import check_archive
from gptattn.runs.folder import RunFolder, step_of, sum_of

KEPT = 2  # the newest, and one to fall back on
SUM_BYTES = 4_000


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
            sum_of(path).unlink(missing_ok=True)
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
    sum_of(path).unlink(missing_ok=True)


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


def remove_old(folder: RunFolder, newest: Path) -> None:
    """Keep `newest` and the one before it; what is later than `newest` was not of its past."""
    known = folder.known_checkpoints()
    later = [path for path in known if step_of(path) > step_of(newest)]
    earlier = [path for path in known if step_of(path) < step_of(newest)]
    for path in [*later, *earlier[KEPT - 1 :]]:
        remove_checkpoint(path)


def choose_checkpoint(
    folder: RunFolder,
    map_location: Any | None = "cpu",
    check: Callable[[dict[str, Any]], object] | None = None,
    most: int | None = None,
) -> Chosen:
    """Read the run's newest good checkpoint. Raises CheckpointError where none is good.

    `check` and `most` as in `read_checkpoint`.
    """
    passed_over: list[tuple[Path, str]] = []
    for path in folder.known_checkpoints():
        try:
            _check_file(path, most)
            _check_sum(path)
            return Chosen(path, read_checkpoint(path, map_location, check, most), passed_over)
        except CheckpointError as error:
            passed_over.append((path, error.message.removeprefix(f"{path} ").partition(";")[0]))
    bad = ", ".join(f"{path.name} {reason}" for path, reason in passed_over)
    raise CheckpointError(
        "checkpoint", f"none in {folder.checkpoints} is good ({bad or 'there is none'})"
    )


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

    `check` sees it while its tensors are still on the disk, to look at names and shapes, and once.
    Raises CheckpointError for a file that is missing, damaged, larger than `most` bytes, or holds
    anything else.
    """
    try:
        check_archive(path, most)
        load = partial(torch.load, path, weights_only=True)
        # First mapped: its tensors take no memory then.
        seen = load(map_location="cpu", mmap=True)
        check_plain(seen)
        if check is not None:
            check(seen)
        return load(map_location=map_location)
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
