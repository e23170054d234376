"""Converts weights from one attention variant to another, exactly where possible.

Variants with heads export and load a canonical per-head layout (`HeadWeights`). A conversion
exports them, changes the number of key/value heads, and loads them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gptattn.attention import Attention, HasHeads, HeadWeights
from gptattn.build.model import shared_arguments
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT, INIT_STD
from gptattn.settings.config import Spec, TrainConfig

# Settings that the weights do not depend on.
WEIGHTLESS_SETTINGS = ("backend", "dropout")
ROPE = ("base", "fraction", "stretch", "pairs")  # settings of rotary positions


def convert_heads(
    weights: HeadWeights, num_kv_heads: int, method: str, generator: torch.Generator
) -> HeadWeights:
    """Return the weights of the layer with `num_kv_heads` key/value heads.

    Fewer heads: each new head is the mean of a group of consecutive old heads, the first of them,
    or a random draw (`method`). More heads: each old head is copied to all heads of its group, so
    the output does not change. Raises ValueError if neither count divides the other.

    Source: Ainslie et al. 2023, arXiv:2305.13245, sec. 2.1 and fig. 4.
    """
    old = len(weights.k_GDE)
    if max(old, num_kv_heads) % min(old, num_kv_heads):
        raise ValueError(
            f"{old} key/value heads cannot become {num_kv_heads}: one must divide the other"
        )

    def change(heads: Tensor) -> Tensor:
        if num_kv_heads >= old:
            return heads.repeat_interleave(num_kv_heads // old, dim=0)
        groups = heads.unflatten(0, (num_kv_heads, -1))
        if method == "mean":
            return groups.mean(dim=1)
        if method == "first":
            return groups[:, 0].clone()
        if heads.ndim == 2:
            return torch.zeros_like(groups[:, 0])  # a bias starts at 0
        return torch.randn(groups[:, 0].shape, generator=generator).to(heads) * INIT_STD

    k_GDE, v_GDE = change(weights.k_GDE), change(weights.v_GDE)
    biases = (weights.k_bias_GD, weights.v_bias_GD)
    k_bias_GD, v_bias_GD = (None if bias is None else change(bias) for bias in biases)
    return replace(weights, k_GDE=k_GDE, v_GDE=v_GDE, k_bias_GD=k_bias_GD, v_bias_GD=v_bias_GD)


def describe_mechanism(cfg: TrainConfig) -> tuple[object, ...]:
    """Return the settings of the attention itself that its weights depend on."""
    return drop_weightless(cfg.attn), cfg.pattern, cfg.layers


def describe_layers(cfg: TrainConfig) -> tuple[object, ...]:
    """Return all settings that a layer's weights depend on."""
    sizes = drop_weightless(shared_arguments(cfg))
    others = (cfg.model.num_layers, cfg.part, cfg.position, cfg.block)
    return describe_mechanism(cfg), sizes, others


def drop_weightless(spec: Spec) -> Spec:
    """Return the settings that weights depend on."""
    return {name: value for name, value in spec.items() if name not in WEIGHTLESS_SETTINGS}


def describe_model(model: GPT, cfg: TrainConfig) -> dict[str, Any]:
    """Return everything that a conversion cannot change in the model, by setting."""
    values: dict[str, Any] = {
        "position": cfg.choices["position"],
        "model.num_layers": len(model.blocks),
        "model.d_model": model.token_embedding.embedding_dim,
        "model.d_mlp": model.layers()[0].d_mlp,
        "model.context_length": model.context_length,
        "model.vocab_size": model.vocab_size,
        "model.mlp": cfg.model.mlp,
        "block.norm": cfg.block.norm,
        "block.bias": cfg.block.bias,
        "block.norm_eps": cfg.block.norm_eps,
        "block.tied_head": cfg.block.tied_head,
    }
    if cfg.model.mlp == "none":
        del values["model.d_mlp"]
    for name in ROPE:
        kinds = [kind for kind in cfg.kinds() if name in kind.position]
        if len({kind.position[name] for kind in kinds}) == 1:
            values[f"position.{name}"] = kinds[0].position[name]
        for kind in kinds if f"position.{name}" not in values else ():
            layer = kind.field.replace("pattern.", "layers.")
            values[f"{layer}.position.rope.{name}"] = kind.position[name]
    attentions = [block.attention for block in model.layers()]
    with_heads = next((one for one in attentions if isinstance(one, HasHeads)), None)
    if with_heads is not None:
        heads = with_heads.export_heads()
        values["model.num_heads"] = len(heads.q_HDE)
        values["model.qkv_bias"] = heads.q_bias_HD is not None
    return values


def transfer_weights(
    source: GPT,
    theirs: TrainConfig,
    target: GPT,
    ours: TrainConfig,
    method: str = "mean",
    seed: int = 0,
) -> None:
    """Put the weights of `source` into `target`.

    If the settings `theirs` and `ours` build the same layers, it copies all weights by name;
    otherwise it calls `convert`. Raises ConfigError as `convert` does.
    """
    if describe_layers(theirs) != describe_layers(ours):
        check_heads(source, theirs)
        check_heads(target, ours)
        convert(source, target, method, seed)
        return
    _refuse_other_names(source.state_dict(), target.state_dict())
    target.load_state_dict(source.state_dict())


def names_in_heads(attention: HasHeads) -> set[str]:
    """Return the `state_dict()` keys that `HeadWeights` covers; a subclass can have more."""
    return {name for names in attention.places_of_heads().values() for name in names}


def check_heads(model: GPT, cfg: TrainConfig) -> list[HasHeads]:
    """Return the attentions. Raise ConfigError, with its setting, for one without heads."""
    attentions = []
    for layer, block in enumerate(model.layers()):
        if not isinstance(block.attention, HasHeads):
            group = cfg.layer(layer).field
            name = f"attn={cfg.choices['attn']}" if group == "attn" else group.rpartition(".")[2]
            raise ConfigError(
                "to",
                f"layer {layer}: {name} has no per-head weights to convert; use an attention with "
                "weights for each head, such as mha or gqa",
            )
        attentions.append(block.attention)
    return attentions


def _refuse_other_names(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    for name in [*theirs, *ours]:
        if name not in theirs or name not in ours or theirs[name].shape != ours[name].shape:
            raise ConfigError(
                "to", f"{name} differs, but only the attention may; give both models the same sizes"
            )


@torch.no_grad()
def convert(source: GPT, target: GPT, method: str = "mean", seed: int = 0) -> None:
    """Put the weights of `source` into `target`, which differs only in its attention.

    The outputs stay the same between MultiHeadAttentionWrapper, MultiHeadAttention and
    GroupedQueryAttention with one key/value head per query head, and if key/value heads are only
    copied. If the target has fewer, `method` merges them. Raises ConfigError if the weights cannot
    be converted.
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

    Raises ValueError if `new` cannot hold a weight of `old`.
    """
    assert isinstance(old, HasHeads)
    assert isinstance(new, HasHeads)
    weights, wanted = old.export_heads(), new.export_heads()
    if weights.q_HDE.shape != wanted.q_HDE.shape:
        raise ValueError(
            f"query heads of shape {list(weights.q_HDE.shape)} cannot become "
            f"{list(wanted.q_HDE.shape)}"
        )
    theirs, places = old.state_dict(), new.state_dict()
    inside = names_in_heads(old) | names_in_heads(new)
    both = {
        name: tensor
        for name, tensor in theirs.items()
        if name not in inside and name in places and places[name].shape == tensor.shape
    }
    lost = [name for name in theirs if name not in names_in_heads(old) | both.keys()]
    if lost:
        raise ValueError(
            f"{', '.join(lost)} of {type(old).__name__} would be lost; keep this variant"
        )
    new.load_heads(convert_heads(weights, len(wanted.k_GDE), method, generator))
    new.load_state_dict(both, strict=False)
