"""Reads a run folder: its settings, its model with the newest weights, and its tokenizer.

It also writes a converted model's folder, which has model.safetensors instead of checkpoints.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptattn.build.data import build_tokenizer
from gptattn.build.model import build_model
from gptattn.data.tokenizer import Tokenizer, encode_prompt
from gptattn.decode.generate import generate_text
from gptattn.decode.sampling import Sampling
from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.machine.disk import expand_path, refuse_taken
from gptattn.machine.source_code import hash_of
from gptattn.model.cost import count_cache
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import read_checkpoint, weights_of
from gptattn.runs.folder import NAMES, RunFolder
from gptattn.runs.tensor_file import read_tensors, write_tensors
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.construct import ForeignTarget, check_targets
from gptattn.settings.identity import KERNELS
from gptattn.settings.own_code import use_recorded
from gptattn.settings.values import build_dataclass


@dataclass(frozen=True)
class SavedRun:
    """A run read from its folder."""

    folder: Path
    cfg: TrainConfig
    model: GPT  # on the CPU, in eval mode
    tokenizer: Tokenizer
    source: Path  # the file of the weights

    def generate(
        self, prompt: str = "", tokens: int = 200, temperature: float = 0.8, seed: int = 1
    ) -> str:
        """Return the prompt, continued by `tokens` new tokens; temperature 0 is greedy.

        Raises DataError for a prompt with unknown characters, ConfigError for the temperature.
        """
        ids, sampling = encode_prompt(self.tokenizer, prompt), Sampling(temperature)
        return generate_text(self.model, self.tokenizer, ids, tokens, sampling, seed)


def load_run(folder: str | Path, allow_targets: Sequence[str] = ()) -> SavedRun:
    """Read the run in `folder`.

    `allow_targets`: packages besides gptattn that its config may name. The config's own list does
    not count, because whoever made the folder wrote it. Warns about modules whose code has changed
    since: the weights may no longer fit it. Raises CheckpointError if something is missing, damaged
    or from another model, ForeignTarget for a `_target_` outside the packages, NumericError if a
    weight is not finite.
    """
    folder = expand_path(folder, "run")
    run, cfg = RunFolder(folder), use_plain_kernels(load_config(folder, allow_targets))
    try:
        tokenizer = build_tokenizer(use_kept_tokenizer(cfg, run))
        model = build_model(cfg, tokenizer.vocab_size)
        if run.weights_file.is_file():
            source, weights = run.weights_file, read_tensors(run.weights_file)
            check_fit(model, weights, source)
        else:
            source, content = newest_checkpoint(run, model)
            weights = weights_of(content)
    except ConfigError as error:
        raise CheckpointError("run", f"{folder}: config.yaml: {error}") from error
    for name, _ in model.named_parameters():  # a buffer may be a mask of -inf
        if not torch.isfinite(weights[name]).all():
            raise NumericError("checkpoint", f"{source}: {name} is not finite; use other weights")
    model.load_state_dict(weights)
    provenance = run.read_provenance()
    code = provenance.code if provenance is not None else {}
    code = {name: digest for name, digest in code.items() if name not in KERNELS["fla"]}
    if changed := [module for module, digest in code.items() if hash_of(module) != digest]:
        print(
            f"warning: run: the code has changed since {folder} was trained ({', '.join(changed)})",
            file=sys.stderr,
        )
    return SavedRun(folder, cfg, model.eval(), tokenizer, source)


def use_plain_kernels(cfg: TrainConfig) -> TrainConfig:
    """Return the settings without GPU kernels, for a machine that may not have them."""
    fields = [kind.field for kind in cfg.kinds() if kind.attn.get("backend") in KERNELS]
    return cfg.with_backends(dict.fromkeys(fields, "auto"))


def newest_checkpoint(folder: RunFolder, model: GPT) -> tuple[Path, dict[str, Any]]:
    """Return the run's newest good checkpoint and its content; warn about newer bad ones.

    `model`: the run's; only names and shapes count. Raises CheckpointError if it has no good one.
    """
    checkpoints = folder.known_checkpoints()
    if not checkpoints:
        raise CheckpointError(
            "run",
            f"{folder.path} has no checkpoint; train with checkpoint=true until a validation ends",
        )
    bad: list[str] = []
    for path in checkpoints:
        try:
            content = read_checkpoint(path)
            check_fit(model, weights_of(content), path)
        except CheckpointError as error:
            reason = error.message.removeprefix(str(path)).lstrip(": ").partition(";")[0]
            bad.append(f"{path.name} {reason}")
            continue
        if bad:
            print(f"warning: checkpoint: {', '.join(bad)}; using {path} instead", file=sys.stderr)
        return path, content
    raise CheckpointError(
        "checkpoint", f"none in {folder.checkpoints} works ({', '.join(bad)}); use another run"
    )


def check_fit(model: GPT, weights: dict[str, Tensor], source: Path) -> None:
    """Raise CheckpointError if the weights in the file `source` are not those of the model."""
    needed, read = ({k: [*t.shape] for k, t in d.items()} for d in (model.state_dict(), weights))
    for name in needed | read:
        if needed.get(name) != read.get(name):
            shapes = f"{name} is {read.get(name, 'missing')}, not {needed.get(name, 'absent')}"
            raise CheckpointError("checkpoint", f"{source} belongs to another model: {shapes}")


def use_kept_tokenizer(cfg: TrainConfig, folder: RunFolder) -> TrainConfig:
    """Return the settings with the path of the folder's copy of the tokenizer, if it has one.

    The recorded path may be gone, and a tokenizer trained by the run has none.
    """
    copy = {"path": str(folder.tokenizer)} if folder.tokenizer.is_dir() else {}
    return replace(cfg, tokenizer=cfg.tokenizer | copy)


def load_config(folder: Path, allow_targets: Sequence[str] = (), field: str = "run") -> TrainConfig:
    """Return the settings in config.yaml, with `allow_targets` in place of the recorded packages.

    Raises CheckpointError, naming the field, if there are none or they cannot be used,
    ForeignTarget if a `_target_` lies outside gptattn and these packages.
    """
    file = RunFolder(folder).config_file
    try:
        node = RunFolder(folder).read_settings()
        use_recorded(node, allowed=bool(allow_targets))
        check_targets(node, allow_targets)
        cfg = build_dataclass(TrainConfig, node)
        check(cfg)
    except ForeignTarget as error:
        raise ForeignTarget(field, f"{file}: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(field, f"{folder} holds no run; give a run folder") from None
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(field, f"{file} cannot be read ({reason[:300]})") from None
    return replace(cfg, allow_targets=list(allow_targets))


def count_caches(folder: Path, lengths: Sequence[int]) -> list[int] | None:
    """Return the bytes of one row's cache in half precision, for each of these lengths in tokens.

    None if a layer has no cache. A window that is a share of the context keeps its length from
    training. Raises CheckpointError if the settings cannot be read.
    """
    with torch.device("meta"):
        model = build_model(use_plain_kernels(load_config(folder)), 1)
    if not all(block.attention.decodes_from_cache for block in model.layers()):
        return None
    return [count_cache(model, tokens) for tokens in lengths]


def save_model(folder: Path, cfg: TrainConfig, model: GPT, tokenizer: Tokenizer) -> None:
    """Write a model that was not trained here as a folder that `load_run` reads.

    Raises RunFolderError if the folder already holds one, or files with such names.
    """
    refuse_taken(folder, "out", *NAMES)
    run = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run.write_tokenizer(tokenizer.files())
    write_tensors(run.weights_file, model.state_dict(), {})
    run.write_settings(cfg)
