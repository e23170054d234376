"""A run folder read back: its settings, its model with the newest weights, its tokenizer."""

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml

from gptattn.build import build_model, build_tokenizer
from gptattn.checkpoint import read_checkpoint
from gptattn.config import TrainConfig, check
from gptattn.data.tokenizer import Tokenizer
from gptattn.errors import CheckpointError, ConfigError
from gptattn.gpt import GPT

CONFIG_BYTES = 1_000_000  # a run writes 2 kB


@dataclass(frozen=True)
class SavedRun:
    """What a run left: everything that is needed to go on from it."""

    folder: Path
    cfg: TrainConfig
    model: GPT  # on the CPU, in eval mode
    tokenizer: Tokenizer
    checkpoint: Path


def load_run(folder: Path) -> SavedRun:
    """The run in `folder`. Raises CheckpointError for what is missing, damaged or foreign."""
    cfg = load_config(folder)
    try:
        tokenizer = build_tokenizer(cfg)
        model = build_model(cfg, tokenizer.vocab_size)
    except ConfigError as error:
        raise CheckpointError("run", f"{folder}: config.yaml: {error}") from error
    checkpoint = newest_checkpoint(folder)
    load_weights(model, read_checkpoint(checkpoint, "cpu"), checkpoint)
    return SavedRun(folder, cfg, model.eval(), tokenizer, checkpoint)


def load_config(folder: Path) -> TrainConfig:
    """The settings in config.yaml. Raises CheckpointError where there are none, or foreign ones."""
    file = folder / "config.yaml"
    try:
        if file.stat().st_size > CONFIG_BYTES:
            raise CheckpointError("run", f"{file} is too large to be a run's; give a run folder")
        node = yaml.safe_load(file.read_text(encoding="utf-8"))
        cfg = _typed(TrainConfig, node)
        assert isinstance(cfg, TrainConfig)
        check(cfg)
    except FileNotFoundError:
        raise CheckpointError("run", f"{folder} holds no run; give a run folder") from None
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError, ConfigError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError("run", f"{file} cannot be read ({reason})") from None
    return cfg


def _typed(kind: type, node: Any) -> Any:
    """The dataclass `kind` from plain values. Raises TypeError or KeyError for other keys."""
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}
    if not isinstance(node, dict) or node.keys() != known:
        raise TypeError(f"its keys are not those of a {kind.__name__} of this version")
    return kind(
        **{k: _typed(hints[k], v) if is_dataclass(hints[k]) else v for k, v in node.items()}
    )


def newest_checkpoint(folder: Path) -> Path:
    """Raises CheckpointError where the run kept none."""
    files = sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise CheckpointError(
            "run", f"{folder} has no checkpoint; train with checkpoint=true, and to a validation"
        )
    return files[-1]


def load_weights(model: GPT, checkpoint: dict[str, Any], source: Path) -> None:
    """Put a checkpoint's weights into the model, every name and shape as it should be."""
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        raise CheckpointError("checkpoint", f"{source} holds no weights of ours")
    weights = {str(name).removeprefix("model."): w for name, w in state.items()}
    own = model.state_dict()
    for name in own.keys() | weights.keys():
        if name not in weights or name not in own:
            which = "lacks" if name in own else "has an unknown"
            raise CheckpointError("checkpoint", f"{source} {which} {name}: it is another model's")
        theirs = getattr(weights[name], "shape", None)
        if theirs != own[name].shape:
            raise CheckpointError(
                "checkpoint",
                f"{source}: {name} is {list(theirs or [])}, the model's is {list(own[name].shape)}",
            )
    with torch.no_grad():
        model.load_state_dict(weights)
