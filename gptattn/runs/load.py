"""Reads a run folder back: its settings, its model with the newest weights, and its tokenizer.

A converted model has the same kind of folder, with model.safetensors instead of checkpoints.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptattn.data.tokenizer import Tokenizer
from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.machine.device import total_memory_bytes
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import Chosen, choose_checkpoint, refuse_pickles
from gptattn.runs.folder import RunFolder
from gptattn.runs.tensor_file import opened, outline, read_tensors
from gptattn.settings.build import build_model, build_tokenizer
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.construct import ForeignTarget, check_targets
from gptattn.settings.values import typed


@dataclass(frozen=True)
class SavedRun:
    """A run read back from its folder."""

    folder: Path
    cfg: TrainConfig
    model: GPT  # on the CPU, in eval mode
    tokenizer: Tokenizer
    source: Path  # the file of the weights


def load_run(folder: str | Path, allow_targets: Sequence[str] = ()) -> SavedRun:
    """Read the run in `folder`.

    `allow_targets`: packages besides gptattn that its config may name. The config's own
    `allow_targets` does not count, because whoever made the folder wrote it. Raises
    CheckpointError if something is missing, damaged or from another model, ForeignTarget for a
    `_target_` outside the packages, NumericError if a weight is not finite.
    """
    folder = Path(folder)
    cfg = load_config(folder, allow_targets)
    with _config_errors(folder):
        tokenizer = _tokenizer(RunFolder(folder), cfg)
        source, weights = _weights(RunFolder(folder), _meta_model(cfg, tokenizer.vocab_size))
        model = build_model(cfg, tokenizer.vocab_size)
    load_weights(model, weights, source)
    return SavedRun(folder, cfg, model.eval(), tokenizer, source)


def resumable(
    folder: RunFolder, cfg: TrainConfig, check_state: Callable[[dict[str, Any], GPT], None]
) -> Chosen:
    """Return the newest good checkpoint for which `check_state(content, model)` does not raise.

    `check_state` refuses a checkpoint with a ValueError; its `model` is on the meta device. Raises
    CheckpointError if no checkpoint is good.
    """
    with _config_errors(folder.path):
        meta_model = _meta_model(cfg, _tokenizer(folder, cfg).vocab_size)
        return _checkpoint(folder, meta_model, check_state)


@contextlib.contextmanager
def _config_errors(folder: Path) -> Iterator[None]:
    """Turn a ConfigError about a folder's settings into a CheckpointError that names the folder."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError("run", f"{folder}: config.yaml: {error}") from error


def with_kept_tokenizer(cfg: TrainConfig, folder: RunFolder) -> TrainConfig:
    """Return the settings with the path of the folder's own copy of the tokenizer, if it has one.

    The recorded path may be gone, and a trained tokenizer has none.
    """
    kept = folder.tokenizer
    own = {"path": str(kept)} if kept.is_dir() else {}
    return replace(cfg, tokenizer=cfg.tokenizer | own)


def _tokenizer(folder: RunFolder, cfg: TrainConfig) -> Tokenizer:
    return build_tokenizer(with_kept_tokenizer(cfg, folder))


def _meta_model(cfg: TrainConfig, vocab_size: int) -> GPT:
    """Build the model on the meta device, where a model of any size takes no memory."""
    with torch.device("meta"):
        return build_model(cfg, vocab_size)


def _weights(folder: RunFolder, meta_model: GPT) -> tuple[Path, dict[str, Tensor]]:
    """Return the newest file of weights and its weights, after checking its names and shapes."""
    source = folder.weights_file
    if source.is_file():
        with opened(source) as file:
            found = outline(file)
        _check_header(meta_model, found, source, folder)
        return source, read_tensors(source, found)
    chosen = _checkpoint(folder, meta_model, lambda content, model: None)
    return chosen.path, chosen.content["weights"]


def _checkpoint(
    folder: RunFolder, meta_model: GPT, check_state: Callable[[dict[str, Any], GPT], None]
) -> Chosen:
    """Return the run's newest good checkpoint, after a warning if newer ones are damaged.

    Raises CheckpointError if the run has no checkpoint, or no good one.
    """
    refuse_pickles(folder)
    if not folder.known_checkpoints():
        raise CheckpointError(
            "run",
            f"{folder.path} has no checkpoint; train with checkpoint=true up to a validation",
        )

    def check(content: dict[str, Any], source: Path) -> None:
        _check_header(meta_model, content["weights"], source, folder)
        check_state(content, meta_model)

    chosen = choose_checkpoint(folder, check)
    if (warning := chosen.warning()) is not None:
        print(warning, file=sys.stderr)
    return chosen


def _check_header(
    meta_model: GPT, found: Mapping[str, Tensor], source: Path, folder: RunFolder
) -> None:
    """Raise CheckpointError if the names and shapes in a file are not those of this model.

    Also if the model is too large for this machine.
    """
    check_shapes(meta_model.state_dict(), found, source)
    check_memory(meta_model, folder.path)


def check_memory(meta_model: GPT, folder: Path, field: str = "run") -> None:
    """Raise CheckpointError if the folder's model needs more memory than this machine has.

    The weights' file does not show that: buffers, such as the tables of rotary positions, need
    memory too, and a config may ask for any amount.
    """
    tensors = [*meta_model.parameters(), *meta_model.buffers()]
    needs, there = sum(t.nbytes for t in tensors), total_memory_bytes(torch.device("cpu"))
    if needs > there:
        raise CheckpointError(
            field, f"{folder}: its model needs {needs:,} bytes, and this machine has {there:,}"
        )


def load_config(folder: Path, allow_targets: Sequence[str] = ()) -> TrainConfig:
    """Return the settings in config.yaml, with `allow_targets` in place of the recorded packages.

    Raises CheckpointError if there are none or they cannot be used, ForeignTarget if a `_target_`
    lies outside gptattn and these packages.
    """
    file = RunFolder(folder).config_file
    try:
        node = RunFolder(folder).read_settings()
        check_targets(node, allow_targets)
        cfg = typed(TrainConfig, node)
        check(cfg)
    except ForeignTarget as error:
        raise ForeignTarget("run", f"{file}: {error}") from None
    except FileNotFoundError:
        raise CheckpointError("run", f"{folder} holds no run; give a run folder") from None
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError("run", f"{file} cannot be read ({reason[:300]})") from None
    return replace(cfg, allow_targets=list(allow_targets))


def load_weights(model: GPT, weights: dict[str, Tensor], source: Path) -> None:
    """Copy the weights into the model; their names and shapes must have been checked.

    Raises NumericError, naming `source`, if a weight is not finite.
    """
    for name, _ in model.named_parameters():  # a buffer may be a mask of -inf
        if not torch.isfinite(weights[name]).all():
            raise NumericError("checkpoint", f"{source}: {name} is not finite; use other weights")
    with torch.no_grad():
        model.load_state_dict(weights)


def check_shapes(own: Mapping[str, Tensor], found: Mapping[str, Tensor], source: Path) -> None:
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
