"""Convert weights from one attention variant to another, exactly where that is possible.

Variants with heads export and load one canonical per-head layout (`HeadWeights`). A conversion
exports, changes the number of key/value heads, and loads.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gptattn.attention.base import Attention, HasHeads, HeadWeights, heads_of, refuse_loss
from gptattn.data import tokenizer_files
from gptattn.data.hub import local_folder
from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.model.gpt import GPT, INIT_STD
from gptattn.model.kinds import default_width
from gptattn.position.base import HeadPosition
from gptattn.position.rope import RotaryPosition
from gptattn.runs.load import load_run
from gptattn.settings.config import TrainConfig
from gptattn.settings.layers import shared_arguments
from gptattn.weights.families import family_of
from gptattn.weights.hugging_face import FILES, as_overrides

# Settings that the weights do not depend on.
WEIGHTLESS_SETTINGS = ("backend", "dropout")
# Settings of the block: those that name one, and those that often differ within one.
OF_BLOCK = {"model.mlp", "block.norm", "block.bias"}
BESIDE_BLOCK = ("block.norm_eps", "block.tied_head")


def convert_heads(
    weights: HeadWeights, num_kv_heads: int, method: str, generator: torch.Generator
) -> HeadWeights:
    """Return the weights of the layer with `num_kv_heads` key/value heads.

    Fewer heads: each new head replaces a group of consecutive old heads by their mean, by the
    first of them, or by a random draw (`method`). More heads: each old head is copied to all heads
    of its group, so the output does not change. Raises ValueError if neither count divides the
    other.

    Source: Ainslie et al. 2023, arXiv:2305.13245, sec. 2.1 and fig. 4.
    """
    old = len(weights.k_GDE)
    if max(old, num_kv_heads) % min(old, num_kv_heads):
        raise ValueError(
            f"{old} key/value heads cannot become {num_kv_heads}: one must divide the other"
        )

    def change(heads: Tensor | None) -> Tensor | None:
        if heads is None or num_kv_heads == old:
            return heads
        if num_kv_heads > old:
            return heads.repeat_interleave(num_kv_heads // old, dim=0)
        groups = heads.unflatten(0, (num_kv_heads, -1))
        if method == "mean":
            return groups.mean(dim=1)
        if method == "first":
            return groups[:, 0].clone()
        if heads.ndim == 2:
            return torch.zeros_like(groups[:, 0])  # a bias starts at 0
        return torch.randn(groups[:, 0].shape, generator=generator).to(heads) * INIT_STD

    return replace(
        weights,
        k_GDE=_not_none(change(weights.k_GDE)),
        v_GDE=_not_none(change(weights.v_GDE)),
        k_bias_GD=change(weights.k_bias_GD),
        v_bias_GD=change(weights.v_bias_GD),
    )


def _not_none(heads: Tensor | None) -> Tensor:
    assert heads is not None
    return heads


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
        model, choices, settings = _source(folder, cfg.allow_targets)
        return Origin(model, choices, settings, _digest(model))


def begin_from(origin: Origin, model: GPT, cfg: TrainConfig) -> None:
    """Put the weights of `origin` into `model`, which was built from `cfg`.

    On the meta device this only checks that they fit. Raises ConfigError if they cannot be
    converted; where other settings would help, it names them.
    """
    with _errors_name_init_from():
        if origin.settings is None or _mechanism(origin.settings) != _mechanism(cfg):
            # First, since no override would help.
            _check_both(origin.model, origin.settings, model, cfg)
        _check_tokenizer(origin, cfg)
        needed = _overrides_needed(origin.model, origin.choices, model, cfg)
        if needed:
            raise ConfigError(
                "to", f"{cfg.init_from} differs from this run; give {' '.join(needed)}"
            )
        take_over(origin.model, origin.settings, model, cfg, cfg.init_method, cfg.seed)


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


@contextlib.contextmanager
def _errors_name_init_from() -> Iterator[None]:
    """Report every error about the run, path, target or checkpoint as one of `init_from`."""
    try:
        yield
    except (CheckpointError, ConfigError, NumericError) as error:
        field = "init_from" if error.field in ("run", "path", "to", "checkpoint") else error.field
        raise type(error)(field, error.message) from error


def _digest(model: GPT) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _source(
    folder: Path, allow_targets: Sequence[str]
) -> tuple[GPT, dict[str, str], TrainConfig | None]:
    """Return the model in a folder, with its `choices` and `settings` as in `Origin`."""
    family = family_of(folder)
    if family is not None:
        tokenizer = {"tokenizer": "gpt2"} if family.has_tokenizer(folder) else {}
        return family.load(folder), family.choices | tokenizer, None
    saved = load_run(folder, allow_targets)
    return saved.model, saved.cfg.choices, saved.cfg


def _overrides_needed(
    source: GPT, choices: dict[str, str], target: GPT, cfg: TrainConfig
) -> list[str]:
    """Return the overrides that would give the target the sizes and the block of the source.

    Raises ConfigError if this run's tokenizer needs more ids than the source has.
    """
    theirs, ours = _fixed(source), _fixed(target)
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
        # Whatever else the block's file sets may differ from what this run has now.
        different = {k: v for k, v in different.items() if k not in OF_BLOCK}
        different |= {name: theirs[name] for name in BESIDE_BLOCK}
    if _kind_of_position(source) != _kind_of_position(target):
        given["position"] = choices["position"]
        # 1.0 is the file's own fraction and stretch.
        own = {name: v for name, v in theirs.items() if name.startswith("position.") and v != 1.0}
        different |= own
    kept = different.keys() - _free(source, target, cfg)
    return as_overrides(given | {name: v for name, v in different.items() if name in kept})


def _free(source: GPT, target: GPT, cfg: TrainConfig) -> set[str]:
    """Which settings among those of `_fixed` may differ here, or are what this run has anyway."""
    free = {"position.stretch"} if _stretched(source, target) else set()
    # No weight depends on the context, but positions beyond the source's are new to its weights.
    shorter = target.context_length < source.context_length
    if source.input_position is None and (shorter or _stretched(source, target)):
        free.add("model.context_length")
    if _fixed(target).get("model.num_heads") != cfg.model.num_heads:
        free.add("model.num_heads")  # the variant sets its own number of heads
    width = default_width(source.style.mlp, source.token_embedding.embedding_dim)
    if source.layers()[0].d_mlp == width and cfg.model.d_mlp is None:
        free.add("model.d_mlp")
    return free


def _fixed(model: GPT) -> dict[str, int | float | bool | str]:
    """What a conversion cannot change in `model`, by the names of the settings."""
    style = model.style
    fixed: dict[str, int | float | bool | str] = {
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
    rope = _rotary(model)
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


def _rotary(model: GPT) -> RotaryPosition | None:
    return next((m for m in model.modules() if isinstance(m, RotaryPosition)), None)


def _stretched(source: GPT, target: GPT) -> bool:
    """Whether the target is to read a longer context than the source was trained with."""
    theirs, ours = _rotary(source), _rotary(target)
    return theirs is not None and ours is not None and ours.stretch > theirs.stretch


def _kind_of_position(model: GPT) -> type:
    """The class of the model's position encoding; NoneType if it has none."""
    in_heads = (m for m in model.modules() if isinstance(m, HeadPosition))
    return type(model.input_position or next(in_heads, None))


def _mechanism(cfg: TrainConfig) -> tuple[object, ...]:
    """Return the settings of the attention itself, without those that its weights ignore."""
    attn = {k: v for k, v in cfg.attn.items() if k not in WEIGHTLESS_SETTINGS}
    return attn, cfg.pattern, cfg.pattern_attn


def same_layers(theirs: TrainConfig, ours: TrainConfig) -> bool:
    """Whether both settings build the same attention layers; backend and dropout may differ."""

    def layers(cfg: TrainConfig) -> tuple[object, ...]:
        sizes = {
            k: v
            for k, v in shared_arguments(cfg.model, cfg.block).items()
            if k not in WEIGHTLESS_SETTINGS
        }
        return _mechanism(cfg), sizes, cfg.model.num_layers, cfg.part, cfg.position, cfg.block

    return layers(theirs) == layers(ours)


def take_over(
    source: GPT,
    theirs: TrainConfig | None,
    target: GPT,
    ours: TrainConfig,
    method: str = "mean",
    seed: int = 0,
) -> None:
    """Put the weights of `source` into `target`.

    If the settings `theirs` and `ours` build the same layers, all weights are copied by name;
    otherwise, or if `theirs` is None, `convert` does it. Raises ConfigError as `convert` does.
    """
    if theirs is None or not same_layers(theirs, ours):
        _check_both(source, theirs, target, ours)
        convert(source, target, method, seed)
        return
    _refuse_other_names(source.state_dict(), target.state_dict())
    target.load_state_dict(source.state_dict())


def _check_both(source: GPT, theirs: TrainConfig | None, target: GPT, ours: TrainConfig) -> None:
    """Raise ConfigError for a layer without heads; None: a Hugging Face checkpoint, with heads."""
    if theirs is not None:
        check_heads(source, theirs)
    check_heads(target, ours)


def check_heads(model: GPT, cfg: TrainConfig) -> None:
    """Raise ConfigError, with the name that the settings give it, for a layer without heads."""
    for layer, block in enumerate(model.layers()):
        group, _ = cfg.attn_of(layer)
        name = f"attn={cfg.choices['attn']}" if group == "attn" else group.rpartition(".")[2]
        try:
            heads_of(block.attention, name)
        except ValueError as error:
            raise ConfigError("to", f"layer {layer}: {error}") from error


def _refuse_other_names(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    for name in theirs.keys() | ours.keys():
        if name not in theirs or name not in ours or theirs[name].shape != ours[name].shape:
            raise ConfigError(
                "to", f"{name} differs, but only the attention may; give both models the same sizes"
            )


@torch.no_grad()
def convert(source: GPT, target: GPT, method: str = "mean", seed: int = 0) -> None:
    """Put the weights of `source` into `target`, which differs only in its attention.

    The outputs stay equal between MultiHeadAttentionWrapper, MultiHeadAttention and
    GroupedQueryAttention with one key/value head per query head, and where key/value heads are
    only copied. If the target has fewer, `method` merges them. Raises ConfigError if the weights
    cannot be converted.
    """
    theirs = {k: v for k, v in source.state_dict().items() if ".attention." not in k}
    ours = {k: v for k, v in target.state_dict().items() if ".attention." not in k}
    _refuse_other_names(theirs, ours)
    generator = torch.Generator().manual_seed(seed)
    for layer, (old, new) in enumerate(zip(source.layers(), target.layers(), strict=True)):
        try:
            _convert_layer(old.attention, new.attention, method, generator)
        except ValueError as error:
            raise ConfigError("to", f"layer {layer}: {error}") from error
    target.load_state_dict(theirs, strict=False)


def _convert_layer(old: Attention, new: Attention, method: str, generator: torch.Generator) -> None:
    """Convert heads through the canonical layout, and copy the other weights by name.

    Raises ValueError if a weight of `old` has no place in `new`.
    """
    weights, wanted = heads_of(old).export_heads(), heads_of(new).export_heads()
    if weights.q_HDE.shape != wanted.q_HDE.shape:
        raise ValueError(
            f"query heads of shape {list(weights.q_HDE.shape)} cannot become "
            f"{list(wanted.q_HDE.shape)}"
        )
    theirs, places = old.state_dict(), new.state_dict()
    inside = heads_of(old).names_in_heads() | heads_of(new).names_in_heads()
    both = {
        name: tensor
        for name, tensor in theirs.items()
        if name not in inside and name in places and places[name].shape == tensor.shape
    }
    refuse_loss(old, set(both))
    heads_of(new).load_heads(convert_heads(weights, len(wanted.k_GDE), method, generator))
    new.load_state_dict(both, strict=False)
