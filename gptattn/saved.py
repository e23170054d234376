"""A run folder read back: its settings, its model with the newest weights, its tokenizer.

Converted models lie in folders of the same form: config.yaml, and model.safetensors in place of
the checkpoints.
"""

import sys
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml
from torch import Tensor

from gptattn.build import build_model, build_tokenizer
from gptattn.checkpoint import (
    Chosen,
    choose_checkpoint,
    known_checkpoints,
    read_safetensors,
    write_atomically,
)
from gptattn.config import TrainConfig, check
from gptattn.data.bpe_files import IN_RUN
from gptattn.data.tokenizer import Tokenizer
from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.gpt import GPT

WEIGHTS = "model.safetensors"
CONFIG_BYTES = 1_000_000  # a run writes 2 kB


@dataclass(frozen=True)
class SavedRun:
    """What a run left: everything that is needed to go on from it."""

    folder: Path
    cfg: TrainConfig
    model: GPT  # on the CPU, in eval mode
    tokenizer: Tokenizer
    source: Path  # of the weights


def load_run(folder: Path) -> SavedRun:
    """The run in `folder`. Raises CheckpointError for what is missing, damaged or foreign."""
    cfg = load_config(folder)
    kept = folder / IN_RUN
    own = {"path": str(kept)} if kept.is_dir() else {}  # whatever became of the recorded path
    try:
        tokenizer = build_tokenizer(replace(cfg, tokenizer=cfg.tokenizer | own))
        model = build_model(cfg, tokenizer.vocab_size)
    except ConfigError as error:
        raise CheckpointError("run", f"{folder}: config.yaml: {error}") from error
    source = folder / WEIGHTS
    if source.is_file():
        weights = read_safetensors(source)
    else:
        chosen = newest_checkpoint(folder)
        source, weights = chosen.path, _state_dict(chosen.content, chosen.path)
    load_weights(model, weights, source)
    return SavedRun(folder, cfg, model.eval(), tokenizer, source)


def save_model(folder: Path, cfg: TrainConfig, model: GPT, tokenizer: Tokenizer) -> None:
    """Write a folder that `load_run` reads. Raises CheckpointError where it holds a run already."""
    refuse_taken(folder)
    from safetensors.torch import save

    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    text = yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)
    save_tokenizer(folder, tokenizer)
    write_atomically(folder / WEIGHTS, lambda file: file.write(save(weights)))
    write_atomically(folder / "config.yaml", lambda file: file.write(text.encode()))


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Keep the files that the run's tokenizer needs, if any: where they came from may move."""
    write_files(folder / IN_RUN, tokenizer)


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    for name, text in tokenizer.files().items():
        raw = text.encode()
        write_atomically(folder / name, lambda file, raw=raw: file.write(raw))


def refuse_taken(folder: Path) -> None:
    """Raise CheckpointError where a folder that is to be written holds a run or a model."""
    for name in ("config.yaml", "config.json", WEIGHTS):
        if (folder / name).exists():
            raise CheckpointError("out", f"{folder} already holds a {name}; give another folder")


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
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
        yaml.YAMLError,
        ConfigError,
    ) as error:
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


def newest_checkpoint(folder: Path) -> Chosen:
    """The run's newest good checkpoint, with a warning where a newer one is damaged.

    Raises CheckpointError where the run kept none, or none is good.
    """
    if not known_checkpoints(folder / "checkpoints"):
        raise CheckpointError(
            "run", f"{folder} has no checkpoint; train with checkpoint=true, and to a validation"
        )
    chosen = choose_checkpoint(folder / "checkpoints")
    if (warning := chosen.warning()) is not None:
        print(warning, file=sys.stderr)
    return chosen


def _state_dict(checkpoint: dict[str, Any], source: Path) -> dict[str, Tensor]:
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError("checkpoint", f"{source} holds no weights of ours")
    return {str(name).removeprefix("model."): weight for name, weight in state.items()}


def load_weights(model: GPT, weights: dict[str, Tensor], source: Path) -> None:
    """Put the weights into the model, every name and shape as it should be."""
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
        if not torch.isfinite(weights[name]).all():
            raise NumericError("checkpoint", f"{source}: {name} is not finite; take another")
    with torch.no_grad():
        model.load_state_dict(weights)
