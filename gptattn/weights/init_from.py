"""Begin a run from the weights that `init_from` names: a run's, or a Hugging Face folder's."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gptattn.attention import HasHeads
from gptattn.data import tokenizer_files
from gptattn.data.hub import local_folder
from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.model.gpt import GPT
from gptattn.position import HeadPosition
from gptattn.runs.load import load_run
from gptattn.settings.config import TrainConfig, default_width
from gptattn.weights.convert import check_both, describe_mechanism, take_over
from gptattn.weights.families import family_of
from gptattn.weights.family import as_overrides, find_rope
from gptattn.weights.hugging_face import FILES

# Settings of the block: those that identify one, and those that often differ within one.
OF_BLOCK = {"model.mlp", "block.norm", "block.bias"}
BESIDE_BLOCK = ("block.norm_eps", "block.tied_head")


@dataclass(frozen=True)
class Origin:
    """The model that `init_from` names, before any conversion."""

    model: GPT
    choices: dict[str, str]  # the config choices that fit the model
    settings: TrainConfig | None  # from its config.yaml; None for a Hugging Face checkpoint
    digest: str  # SHA-256 of the weights


def read_origin(cfg: TrainConfig) -> Origin:
    """Read what `cfg.init_from` names: a run, a converted model or a Hugging Face checkpoint.

    Raises CheckpointError if it cannot be read.
    """
    assert cfg.init_from is not None
    with _errors_name_init_from():
        folder = local_folder(cfg.init_from, "init_from", (*FILES, *tokenizer_files.FILES))
        if not folder.is_dir():
            raise CheckpointError(
                "run",
                f"{folder} is not a folder; give a run's, a GPT-2's, a Llama's, or hf:owner/name",
            )
        family = family_of(folder)
        if family is None:
            saved = load_run(folder, cfg.allow_targets)
            return Origin(saved.model, saved.cfg.choices, saved.cfg, _digest(saved.model))
        tokenizer = {"tokenizer": "gpt2"} if family.has_tokenizer(folder) else {}
        model = family.load(folder)
        return Origin(model, family.choices | tokenizer, None, _digest(model))


def _digest(model: GPT) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def begin_from(origin: Origin, model: GPT, cfg: TrainConfig) -> None:
    """Put the weights of `origin` into `model`, which was built from `cfg`.

    On the meta device this only checks that they fit. Raises ConfigError if they cannot be
    converted, naming other settings that would help.
    """
    with _errors_name_init_from():
        theirs = None if origin.settings is None else describe_mechanism(origin.settings)
        if theirs != describe_mechanism(cfg):
            # First, since no override can fix this.
            check_both(origin.model, origin.settings, model, cfg)
        _check_tokenizer(origin, cfg)
        needed = _overrides_needed(origin, model, cfg)
        if needed:
            raise ConfigError(
                "to", f"{cfg.init_from} differs from this run; give {' '.join(needed)}"
            )
        take_over(origin.model, origin.settings, model, cfg, cfg.init_method, cfg.seed)


@contextlib.contextmanager
def _errors_name_init_from() -> Iterator[None]:
    """Report every error about the run, path, target or checkpoint under `init_from`."""
    try:
        yield
    except (CheckpointError, ConfigError, NumericError) as error:
        field = "init_from" if error.field in ("run", "path", "to", "checkpoint") else error.field
        raise type(error)(field, error.message) from error


def _check_tokenizer(origin: Origin, cfg: TrainConfig) -> None:
    """Raise ConfigError if both tokenizers are BPEs, and not the same."""
    if origin.settings is None:
        return
    theirs, ours = (one.tokenizer.get("sha256") for one in (origin.settings, cfg))
    if None not in (theirs, ours) and theirs != ours:
        raise ConfigError(
            "to",
            f"{cfg.init_from} was trained with other tokens than this run's; give "
            f"tokenizer.path={cfg.init_from}",
        )


def _overrides_needed(origin: Origin, target: GPT, cfg: TrainConfig) -> list[str]:
    """Return the overrides that would give the target the sizes and the block of the origin.

    Raises ConfigError if this run's tokenizer needs more ids than the origin has.
    """
    source, choices = origin.model, origin.choices
    theirs, ours = _fixed_settings(source), _fixed_settings(target)
    different = {name: value for name, value in theirs.items() if value != ours.get(name, value)}
    given, tokenizer = {}, cfg.choices["tokenizer"]
    if "model.vocab_size" in different and choices.get("tokenizer", tokenizer) != tokenizer:
        del different["model.vocab_size"]
        given["tokenizer"] = choices["tokenizer"]
    elif cfg.model.vocab_size is None and target.vocab_size > source.vocab_size:
        raise ConfigError(
            "to",
            f"it has {source.vocab_size:,} ids, but tokenizer={tokenizer} has "
            f"{target.vocab_size:,}; use the tokenizer that it was trained with",
        )
    if different.keys() & OF_BLOCK and choices["block"] != cfg.choices["block"]:
        given["block"] = choices["block"]
        # Choosing the block's file may change other settings as well.
        different = {k: v for k, v in different.items() if k not in OF_BLOCK}
        different |= {name: theirs[name] for name in BESIDE_BLOCK}
    if _kind_of_position(source) != _kind_of_position(target):
        given["position"] = choices["position"]
        # 1.0 is the file's own fraction and stretch.
        own = {name: v for name, v in theirs.items() if name.startswith("position.") and v != 1.0}
        different |= own

    stretched = ours.get("position.stretch", 1.0) > theirs.get("position.stretch", 1.0)
    if stretched:
        different.pop("position.stretch", None)
    # No weight depends on the context, but positions beyond the source's are new to its weights.
    shorter = target.context_length < source.context_length
    if source.input_position is None and (shorter or stretched):
        different.pop("model.context_length", None)
    if ours.get("model.num_heads") != cfg.model.num_heads:  # the variant sets its own number
        different.pop("model.num_heads", None)
    width = default_width(source.style.mlp, source.token_embedding.embedding_dim)
    if theirs.get("model.d_mlp") == width and cfg.model.d_mlp is None:
        different.pop("model.d_mlp", None)  # this run gets it anyway, at the source's width
    return as_overrides(given | different)


def _fixed_settings(model: GPT) -> dict[str, Any]:
    """Return what a conversion cannot change in the model, by the names of the settings."""
    style = model.style
    fixed: dict[str, Any] = {
        "model.num_layers": len(model.blocks),
        "model.d_model": model.token_embedding.embedding_dim,
        "model.d_mlp": model.layers()[0].d_mlp,
        "model.context_length": model.context_length,
        "model.vocab_size": model.vocab_size,
        "model.mlp": style.mlp,
        "block.norm": style.norm,
        "block.bias": style.bias,
        "block.norm_eps": style.norm_eps,
        "block.tied_head": model.lm_head is None,
    }
    if style.mlp == "none":
        del fixed["model.d_mlp"]
    rope = find_rope(model)
    if rope is not None:
        fixed["position.base"] = rope.base
        fixed["position.fraction"], fixed["position.stretch"] = rope.fraction, rope.stretch
    attentions = [block.attention for block in model.layers()]
    with_heads = next((layer for layer in attentions if isinstance(layer, HasHeads)), None)
    if with_heads is not None:
        heads = with_heads.export_heads()
        fixed["model.num_heads"] = len(heads.q_HDE)
        fixed["model.qkv_bias"] = heads.q_bias_HD is not None
    return fixed


def _kind_of_position(model: GPT) -> type:
    """Return the class of the model's position encoding; NoneType if it has none."""
    in_heads = (m for m in model.modules() if isinstance(m, HeadPosition))
    return type(model.input_position or next(in_heads, None))
