"""Starts a run from the weights that `init_from` names: a run's or a Hugging Face folder's."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gptattn.data.hub import local_folder
from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.model.gpt import GPT
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_run
from gptattn.settings.config import TrainConfig, default_width
from gptattn.weights.convert import (
    check_heads,
    describe_mechanism,
    describe_model,
    transfer_weights,
)
from gptattn.weights.families import as_overrides
from gptattn.weights.hugging_face import FILES, find_family, find_tokenizer, load_checkpoint


@dataclass(frozen=True)
class Origin:
    """The model that `init_from` names, before any conversion."""

    model: GPT
    cfg: TrainConfig
    tokenizer: str | None  # the matching choice in conf/tokenizer; None: it has none
    digest: str  # SHA-256 of the weights
    made_by: str  # `Provenance.digest` of the run that made them; "" if unknown


def read_origin(cfg: TrainConfig) -> Origin:
    """Read the run, converted model or Hugging Face checkpoint that `cfg.init_from` names.

    Raises CheckpointError if it cannot be read.
    """
    assert cfg.init_from is not None
    with _errors_name_init_from():
        folder = local_folder(cfg.init_from, "init_from", FILES)
        if not folder.is_dir():
            raise CheckpointError(
                "run",
                f"{folder} is not a folder; give a run, a Hugging Face model or hf:owner/name",
            )
        family = find_family(folder)
        if family is None:
            saved = load_run(folder, cfg.allow_targets)
            theirs, model, tokenizer = saved.cfg, saved.model, saved.cfg.choices["tokenizer"]
        else:
            theirs, model = load_checkpoint(folder, family)
            tokenizer = find_tokenizer(folder, family)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    record = RunFolder(folder).read_provenance()
    return Origin(model, theirs, tokenizer, digest.hexdigest(), record.digest if record else "")


def begin_from(origin: Origin, model: GPT, cfg: TrainConfig) -> None:
    """Put the weights of `origin` into `model`, which was built from `cfg`.

    On the meta device, it only checks that they fit. Raises ConfigError if they cannot be
    converted; the error names settings that would help.
    """
    with _errors_name_init_from():
        if describe_mechanism(origin.cfg) != describe_mechanism(cfg):
            # Check this first, since no override can fix it.
            check_heads(origin.model, origin.cfg)
            check_heads(model, cfg)
        theirs, ours = (one.tokenizer.get("sha256") for one in (origin.cfg, cfg))
        if None not in (theirs, ours) and theirs != ours:
            raise ConfigError(
                "to",
                f"{cfg.init_from} was trained with a different tokenizer from this run's; give "
                f"tokenizer.path={cfg.init_from}",
            )
        needed = as_overrides(list_settings_needed(origin, model, cfg))
        if needed:
            raise ConfigError(
                "to", f"{cfg.init_from} differs from this run; give {' '.join(needed)}"
            )
        transfer_weights(origin.model, origin.cfg, model, cfg, cfg.init_method, cfg.seed)


@contextlib.contextmanager
def _errors_name_init_from() -> Iterator[None]:
    """Report every error about the run, path, target or checkpoint under `init_from`."""
    try:
        yield
    except (CheckpointError, ConfigError, NumericError) as error:
        field = "init_from" if error.field in ("run", "path", "to", "checkpoint") else error.field
        raise type(error)(field, error.message) from error


def list_settings_needed(origin: Origin, target: GPT, cfg: TrainConfig) -> dict[str, Any]:
    """Return the settings that would give the target the origin's sizes and block.

    Raises ConfigError if this run's tokenizer needs more ids than the origin has.
    """
    source = origin.model
    theirs, ours = describe_model(source, origin.cfg), describe_model(target, cfg)
    different = {name: value for name, value in theirs.items() if value != ours.get(name, value)}
    given: dict[str, Any] = {}
    tokenizer = cfg.choices["tokenizer"]
    if "model.vocab_size" in different and origin.tokenizer not in (None, tokenizer):
        del different["model.vocab_size"]
        given["tokenizer"] = origin.tokenizer
    elif cfg.model.vocab_size is None and target.vocab_size > source.vocab_size:
        raise ConfigError(
            "to",
            f"{cfg.init_from} has {source.vocab_size:,} ids, but tokenizer={tokenizer} has "
            f"{target.vocab_size:,}; use the tokenizer it was trained with",
        )
    if "position" in different:
        different |= {n: v for n, v in theirs.items() if n.startswith("position.")}
    stretched = ours.get("position.stretch", 1.0) > theirs.get("position.stretch", 1.0)
    if stretched:
        different.pop("position.stretch", None)
    # No weight depends on the context, but positions beyond the source's are new to the weights.
    shorter = target.context_length < source.context_length
    if source.input_position is None and (shorter or stretched):
        different.pop("model.context_length", None)
    if ours.get("model.num_heads") != cfg.model.num_heads:  # the variant sets its own number
        different.pop("model.num_heads", None)
    width = default_width(source.style.mlp, source.token_embedding.embedding_dim)
    if theirs.get("model.d_mlp") == width and cfg.model.d_mlp is None:
        different.pop("model.d_mlp", None)  # this run has it already, at the source's width
    return given | different
