"""A run folder read back: its settings, its model with the newest weights, its tokenizer.

Converted models lie in folders of the same form: config.yaml, and model.safetensors in place of
the checkpoints.
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
from gptattn.runs.tensor_file import read_tensors, tensor_shapes
from gptattn.settings.build import build_model, build_tokenizer
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.targets import ForeignTarget, check_targets
from gptattn.settings.values import typed


@dataclass(frozen=True)
class SavedRun:
    """What a run left: everything that is needed to go on from it."""

    folder: Path
    cfg: TrainConfig
    model: GPT  # on the CPU, in eval mode
    tokenizer: Tokenizer
    source: Path  # of the weights


def load_run(folder: str | Path, allow_targets: Sequence[str] = ()) -> SavedRun:
    """The run in `folder`. Raises CheckpointError for what is missing, damaged or foreign.

    `allow_targets`: packages besides gptattn that its config may name. What the config itself says
    of them does not count: whoever made the folder wrote that.
    """
    folder = Path(folder)
    cfg = load_config(folder, allow_targets)
    with _config_errors(folder):
        tokenizer = _tokenizer(RunFolder(folder), cfg)
        source, weights = _weights(RunFolder(folder), _outline(cfg, tokenizer.vocab_size))
        model = build_model(cfg, tokenizer.vocab_size)
    load_weights(model, weights, source)
    return SavedRun(folder, cfg, model.eval(), tokenizer, source)


def resumable(
    folder: RunFolder, cfg: TrainConfig, check_state: Callable[[dict[str, Any], GPT], None]
) -> Chosen:
    """The run's newest good checkpoint of which `check_state(content, model)` raises no ValueError.

    `model` is on the meta device. Raises CheckpointError where none is good.
    """
    with _config_errors(folder.path):
        outline = _outline(cfg, _tokenizer(folder, cfg).vocab_size)
        return _checkpoint(folder, outline, check_state)


@contextlib.contextmanager
def _config_errors(folder: Path) -> Iterator[None]:
    """Of what a folder's settings ask for, what cannot be is told as its mistake."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError("run", f"{folder}: config.yaml: {error}") from error


def _tokenizer(folder: RunFolder, cfg: TrainConfig) -> Tokenizer:
    kept = folder.tokenizer
    own = {"path": str(kept)} if kept.is_dir() else {}  # whatever became of the recorded path
    return build_tokenizer(replace(cfg, tokenizer=cfg.tokenizer | own))


def _outline(cfg: TrainConfig, vocab_size: int) -> GPT:
    """The model on the meta device: names and shapes of any size take no memory."""
    with torch.device("meta"):
        return build_model(cfg, vocab_size)


def _weights(folder: RunFolder, outline: GPT) -> tuple[Path, dict[str, Tensor]]:
    """The file and its weights, once its header is known to be that of this model."""
    source = folder.weights_file
    if source.is_file():
        shapes = tensor_shapes(source)
        _check_header(outline, shapes, source, folder)
        return source, read_tensors(source, shapes)
    chosen = _checkpoint(folder, outline, lambda content, model: None)
    return chosen.path, chosen.content["weights"]


def _checkpoint(
    folder: RunFolder, outline: GPT, check_state: Callable[[dict[str, Any], GPT], None]
) -> Chosen:
    """The run's newest good checkpoint, with a warning where a newer one is damaged.

    Raises CheckpointError where the run kept none, or none is good.
    """
    refuse_pickles(folder)
    if not folder.known_checkpoints():
        raise CheckpointError(
            "run",
            f"{folder.path} has no checkpoint; train with checkpoint=true, and to a validation",
        )

    def check(content: dict[str, Any]) -> None:
        _check_header(outline, _shapes(content["weights"]), folder.path, folder)
        check_state(content, outline)

    chosen = choose_checkpoint(folder, check)
    if (warning := chosen.warning()) is not None:
        print(warning, file=sys.stderr)
    return chosen


def _check_header(
    outline: GPT, found: Mapping[str, list[int] | None], source: Path, folder: RunFolder
) -> None:
    """Raise CheckpointError where a file's names and shapes are not those of this model.

    Or where that model is too large for this machine: a config may ask for any amount of memory,
    and tables that no weight shows take some.
    """
    check_shapes({n: list(t.shape) for n, t in outline.state_dict().items()}, found, source)
    tensors = [*outline.parameters(), *outline.buffers()]
    needs, there = sum(t.nbytes for t in tensors), total_memory_bytes(torch.device("cpu"))
    if needs > there:
        raise CheckpointError(
            "run", f"{folder.path}: its model needs {needs:,} bytes, and there are {there:,}"
        )


def load_config(folder: Path, allow_targets: Sequence[str] = ()) -> TrainConfig:
    """The settings in config.yaml. Raises CheckpointError where there are none, or foreign ones.

    `allow_targets` takes the place of the recorded packages; ForeignTarget for one that it lacks.
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
    """Put the weights, whose names and shapes are known to be the model's, into it.

    Raises NumericError, naming `source`, for one that is not finite.
    """
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise NumericError("checkpoint", f"{source}: {name} is not finite; take another")
    with torch.no_grad():
        model.load_state_dict(weights)


def _shapes(weights: dict[str, Any]) -> dict[str, list[int] | None]:
    """None for what is no tensor of floating-point numbers."""
    return {
        name: list(weight.shape)
        if isinstance(weight, Tensor) and weight.is_floating_point()
        else None
        for name, weight in weights.items()
    }


def check_shapes(
    own: Mapping[str, list[int]], found: Mapping[str, list[int] | None], source: Path
) -> None:
    """Raise CheckpointError for a name that the model has not or lacks, or for another shape."""
    for name in sorted(own.keys() | found.keys()):
        if name not in found or name not in own:
            which = "lacks" if name in own else "has an unknown"
            raise CheckpointError(
                "checkpoint", f"{source} {which} {name[:100]!r}: it is another model's"
            )
        if found[name] != own[name]:
            theirs = found[name] or "no tensor of floating-point numbers"
            raise CheckpointError(
                "checkpoint", f"{source}: {name} is {theirs}, the model's is {own[name]}"
            )
