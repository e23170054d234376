"""A run folder read back: its settings, its model with the newest weights, its tokenizer.

Converted models lie in folders of the same form: config.yaml, and model.safetensors in place of
the checkpoints.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from gptattn.data.bpe_files import IN_RUN
from gptattn.data.tokenizer import Tokenizer
from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.machine.device import total_memory_bytes
from gptattn.machine.disk import make_folder, write_atomically
from gptattn.machine.untrusted import CONFIG_BYTES, read_yaml
from gptattn.model.cost import parameter_count
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import (
    Chosen,
    choose_checkpoint,
    known_checkpoints,
    read_safetensors,
    tensor_shapes,
)
from gptattn.settings.build import build_model, build_tokenizer
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.targets import ForeignTarget, check_targets
from gptattn.settings.values import typed

WEIGHTS = "model.safetensors"
# Of a checkpoint: per parameter a weight of 64 bits and AdamW's two averages; all the rest.
MOST_BYTES, OTHER_BYTES = 24, 32_000_000


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
    try:
        tokenizer = _tokenizer(folder, cfg)
        source, weights = _weights(folder, cfg, tokenizer.vocab_size)
        model = build_model(cfg, tokenizer.vocab_size)
    except ConfigError as error:
        raise CheckpointError("run", f"{folder}: config.yaml: {error}") from error
    load_weights(model, weights, source)
    return SavedRun(folder, cfg, model.eval(), tokenizer, source)


def _tokenizer(folder: Path, cfg: TrainConfig) -> Tokenizer:
    kept = folder / IN_RUN
    own = {"path": str(kept)} if kept.is_dir() else {}  # whatever became of the recorded path
    return build_tokenizer(replace(cfg, tokenizer=cfg.tokenizer | own))


def _weights(folder: Path, cfg: TrainConfig, vocab_size: int) -> tuple[Path, dict[str, Tensor]]:
    """The file and its weights, once its header is known to be that of this model."""
    source = folder / WEIGHTS
    if source.is_file():
        shapes = tensor_shapes(source)
        _check_header(cfg, _small(cfg, vocab_size), shapes, source)
        return source, read_safetensors(source, shapes)
    chosen = _checkpoint(folder, cfg, vocab_size, lambda content, model: None)
    return chosen.path, _state_dict(chosen.content, chosen.path)


def resumable(
    folder: Path, cfg: TrainConfig, check_state: Callable[[dict[str, Any], GPT], None]
) -> Chosen:
    """The run's newest good checkpoint of which `check_state(content, model)` raises no ValueError.

    `model` is on the meta device. Raises CheckpointError where none is good.
    """
    try:
        return _checkpoint(folder, cfg, _tokenizer(folder, cfg).vocab_size, check_state)
    except ConfigError as error:
        raise CheckpointError("run", f"{folder}: config.yaml: {error}") from error


def _small(cfg: TrainConfig, vocab_size: int) -> GPT:
    """The model with its first layers alone, on the meta device."""
    few = replace(cfg, model=replace(cfg.model, num_layers=min(cfg.model.num_layers, 2)))
    with torch.device("meta"):
        return build_model(few, vocab_size)


def _checkpoint(
    folder: Path,
    cfg: TrainConfig,
    vocab_size: int,
    check_state: Callable[[dict[str, Any], GPT], None],
) -> Chosen:
    # A config may ask for any amount of memory: nothing is built before the file's header is seen.
    small = _small(cfg, vocab_size)

    def check(content: dict[str, Any]) -> None:
        check_state(
            content, _check_header(cfg, small, _shapes(_state_dict(content, folder)), folder)
        )

    block, layers = parameter_count(small.layers()[0]), len(small.layers())
    count = parameter_count(small) + (cfg.model.num_layers - layers) * block
    return newest_checkpoint(folder, check, MOST_BYTES * count + OTHER_BYTES)


def _check_header(
    cfg: TrainConfig, small: GPT, found: Mapping[str, list[int] | None], source: Path
) -> GPT:
    """Raise CheckpointError where names and shapes are not those of the model of `cfg`.

    Returns that model, on the meta device. `small` is it with its first layers alone: only where
    the file has as many layers are the others built.
    """
    first = {name: list(tensor.shape) for name, tensor in small.state_dict().items()}
    outer = {n: s for n, s in found.items() if n in first or not n.startswith("blocks.")}
    check_shapes(first, outer, source)
    layers = {name.split(".")[1] for name in found if name.startswith("blocks.")}
    if len(layers) < cfg.model.num_layers:
        raise CheckpointError(
            "checkpoint",
            f"{source} lacks blocks.{len(layers)}: config.yaml has {cfg.model.num_layers} layers",
        )
    with torch.device("meta"):
        model = build_model(cfg, small.vocab_size)
    tensors = [*model.parameters(), *model.buffers()]
    needs, there = sum(t.nbytes for t in tensors), total_memory_bytes(torch.device("cpu"))
    if needs > there:
        raise CheckpointError(
            "run", f"{source.parent}: its model needs {needs:,} bytes, and there are {there:,}"
        )
    check_shapes({n: list(t.shape) for n, t in model.state_dict().items()}, found, source)
    return model


def save_model(folder: Path, cfg: TrainConfig, model: GPT, tokenizer: Tokenizer) -> None:
    """Write a folder that `load_run` reads. Raises CheckpointError where it holds a run already."""
    refuse_taken(folder)
    from safetensors.torch import save

    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    text = yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)
    make_folder(folder)
    save_tokenizer(folder, tokenizer)
    write_atomically(folder / WEIGHTS, lambda file: file.write(save(weights)))
    write_atomically(folder / "config.yaml", lambda file: file.write(text.encode()))


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Keep the files that the run's tokenizer needs, if any: where they came from may move."""
    write_files(folder / IN_RUN, tokenizer, folder)


def write_files(folder: Path, tokenizer: Tokenizer, root: Path | None = None) -> None:
    """The tokenizer's files, as they are; `root` as in `disk.make_folder`."""
    for name, text in tokenizer.files().items():
        raw = text.encode()
        write_atomically(folder / name, lambda file, raw=raw: file.write(raw), root)


def refuse_taken(folder: Path) -> None:
    """Raise CheckpointError where a folder that is to be written holds a run or a model."""
    for name in ("config.yaml", "config.json", WEIGHTS):
        if (folder / name).exists():
            raise CheckpointError("out", f"{folder} already holds a {name}; give another folder")


def load_config(folder: Path, allow_targets: Sequence[str] = ()) -> TrainConfig:
    """The settings in config.yaml. Raises CheckpointError where there are none, or foreign ones.

    `allow_targets` takes the place of the recorded packages; ForeignTarget for one that it lacks.
    """
    file = folder / "config.yaml"
    try:
        node = read_yaml(file, CONFIG_BYTES)
        check_targets(node, allow_targets)
        cfg = typed(TrainConfig, node)
        check(cfg)
    except ForeignTarget as error:
        raise ForeignTarget("run", f"{file}: {error}") from None
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
        raise CheckpointError("run", f"{file} cannot be read ({reason[:300]})") from None
    return replace(cfg, allow_targets=list(allow_targets))


def newest_checkpoint(folder: Path, check: Callable[[dict[str, Any]], object], most: int) -> Chosen:
    """The run's newest good checkpoint, with a warning where a newer one is damaged.

    `check` and `most` as in `read_checkpoint`.

    Raises CheckpointError where the run kept none, or none is good.
    """
    if not known_checkpoints(folder / "checkpoints"):
        raise CheckpointError(
            "run", f"{folder} has no checkpoint; train with checkpoint=true, and to a validation"
        )
    chosen = choose_checkpoint(folder / "checkpoints", "cpu", check, most)
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
    own = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    check_shapes(own, _shapes(weights), source)
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
